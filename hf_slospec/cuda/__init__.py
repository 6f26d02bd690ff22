"""Attention kernels, CUDA graphs and fused layers for CUDA devices."""


def register() -> None:
    """Register what this plugin adds to the core."""
    from hf_slospec.cuda.captured import CudaGraphPath
    from hf_slospec.model.paths import register_path

    register_path(CudaGraphPath)
