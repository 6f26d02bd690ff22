"""Models whose layers keep states, attend by themselves or to an encoder, or are split over processes."""


def register() -> None:
    """Add the families, in the order in which models are probed, and split models."""
    from hf_slospec.families.encoder import EncoderDecoders
    from hf_slospec.families.gathered import Gathered
    from hf_slospec.families.ranks import split_ranks_of
    from hf_slospec.families.recurrent import Recurrent
    from hf_slospec.model.family import FAMILIES
    from hf_slospec.model.ranks import split_ranks

    FAMILIES[:] = EncoderDecoders(), Recurrent(), Gathered()
    split_ranks.append(split_ranks_of)
