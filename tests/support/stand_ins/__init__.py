"""Stand-ins for CUDA devices, kernels and replicas on a machine without them."""
