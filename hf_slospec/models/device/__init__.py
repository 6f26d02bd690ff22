"""CUDA graphs and the transfers between host and device."""
