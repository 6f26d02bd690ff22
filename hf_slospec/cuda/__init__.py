"""Attention kernels, CUDA graphs and fused layers for CUDA devices."""


def register() -> None:
    """Add the attention backends, in the order in which ``"auto"`` tries them."""
    from hf_slospec.cuda import flash_attention, tree_attention
    from hf_slospec.model.attention.backends import KERNELS, Kernels

    KERNELS["triton"] = Kernels(
        tree_attention.why_no_kernel,
        lambda _, by_path: tree_attention.TreeAttention(by_path),
    )
    KERNELS["flash"] = Kernels(
        flash_attention.why_no_kernel, lambda layers, _: flash_attention.new_flash_attention(layers)
    )
