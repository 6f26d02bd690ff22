"""Attention kernels, CUDA graphs and fused layers for CUDA devices."""


def register() -> None:
    """Add the overrides of layers."""
    from hf_slospec.cuda.exact import InvariantProducts
    from hf_slospec.cuda.fused_layers import FusedLayers
    from hf_slospec.model.overrides import register_override

    register_override(FusedLayers.for_model)
    register_override(InvariantProducts.for_model)
