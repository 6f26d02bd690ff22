"""Attention kernels, CUDA graphs and fused layers for CUDA devices."""


def register() -> None:
    """Add the forward path of this plugin to the registry."""
    from hf_slospec.cuda.captured import CudaGraphPath
    from hf_slospec.model.paths import register_path

    register_path(CudaGraphPath)
