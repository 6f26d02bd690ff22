"""CPU kernels and threads."""
