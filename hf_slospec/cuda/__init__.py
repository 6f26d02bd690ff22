"""Attention kernels, CUDA graphs and fused layers for CUDA devices."""


def register() -> None:
    """Add the attention backends, in the order in which ``"auto"`` tries them, and the path of
    CUDA graphs.
    """
    from hf_slospec.cuda import flash_attention, tree_attention
    from hf_slospec.cuda.captured import CudaGraphPath
    from hf_slospec.model.attention.backends import KERNELS, Kernels
    from hf_slospec.model.paths import register_path

    KERNELS["triton"] = Kernels(
        tree_attention.why_no_kernel,
        lambda _: tree_attention.TreeAttention(),
        lambda: tree_attention.TreeAttention(by_path=True),
    )
    KERNELS["flash"] = Kernels(flash_attention.why_no_kernel, flash_attention.new_flash_attention)
    register_path(CudaGraphPath)
