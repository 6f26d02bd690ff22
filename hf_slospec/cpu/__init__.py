"""Forwards on CPUs: compiled graphs, packed weights, and products with reproducible bits."""


def register() -> None:
    """Add the ``compiled`` forward path, quantised weights that stay packed, and the overrides that
    compute linear layers with packed weights or with exact products.
    """
    from hf_slospec.cpu.compiled import CompiledPath
    from hf_slospec.cpu.exact import ExactProducts
    from hf_slospec.cpu.packed_weights import PackedWeights
    from hf_slospec.cpu.quantised_models import pack_weights
    from hf_slospec.model.linear_overrides import register_override
    from hf_slospec.model.paths import register_path
    from hf_slospec.model.preparation import register_preparation

    register_preparation(pack_weights)
    register_path(CompiledPath)
    register_override(PackedWeights.for_model)
    register_override(ExactProducts.for_model)
