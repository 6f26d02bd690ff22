"""Compiled forwards, packed weights and exact forwards on CPUs."""


def register() -> None:
    """Add the path of compiled forwards, and the overrides of linear layers."""
    from hf_slospec.cpu.compiled import CompiledPath
    from hf_slospec.cpu.exact import ExactProducts
    from hf_slospec.cpu.packed_weights import PackedWeights
    from hf_slospec.model.linear_overrides import register_override
    from hf_slospec.model.paths import register_path

    register_path(CompiledPath)
    register_override(PackedWeights.for_model)
    register_override(ExactProducts.for_model)
