"""Forwards on CPUs: compiled graphs, packed weights, and products with reproducible bits."""


def register() -> None:
    """Add the ``compiled`` forward path, and the overrides that compute linear layers with packed
    weights or with exact products.
    """
    from hf_slospec.cpu.compiled import CompiledPath
    from hf_slospec.cpu.exact import ExactProducts
    from hf_slospec.cpu.packed_weights import PackedWeights
    from hf_slospec.model.linear_overrides import register_override
    from hf_slospec.model.paths import register_path

    register_path(CompiledPath)
    register_override(PackedWeights.for_model)
    register_override(ExactProducts.for_model)
