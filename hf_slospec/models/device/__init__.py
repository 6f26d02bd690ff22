"""Memory, threads, transfers and CUDA graphs of the host and devices."""
