"""Attention kernels, CUDA graphs and fused layers for CUDA devices."""


def register() -> None:
    """Add attention backends (``"auto"`` tries them in this order), the ``cuda_graphs`` forward
    path, and the overrides that compute layers by fused kernels or by exact products.
    """
    from hf_slospec.cuda import flash_attention, tree_attention
    from hf_slospec.cuda.captured import CudaGraphPath
    from hf_slospec.cuda.exact import InvariantProducts
    from hf_slospec.cuda.fastest import FastestAttention
    from hf_slospec.cuda.fused_layers import FusedLayers
    from hf_slospec.model.attention.backends import FASTEST, KERNELS, Kernels
    from hf_slospec.model.linear_overrides import register_override
    from hf_slospec.model.paths import register_path

    KERNELS["triton"] = Kernels(
        tree_attention.why_no_kernel,
        lambda _, by_path: tree_attention.TreeAttention(by_path),
    )
    KERNELS["flash"] = Kernels(
        flash_attention.why_no_kernel, lambda layers, _: flash_attention.new_flash_attention(layers)
    )
    FASTEST[:] = [FastestAttention]
    register_path(CudaGraphPath)
    register_override(FusedLayers.for_model)
    register_override(InvariantProducts.for_model)
