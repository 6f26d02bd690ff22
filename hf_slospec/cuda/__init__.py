"""Attention kernels, CUDA graphs and fused layers for CUDA devices."""
