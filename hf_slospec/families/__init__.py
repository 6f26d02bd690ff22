"""Plugin for models that the core's packed forward cannot run: models with recurrent states,
encoder-decoders, models that compute attention in their own code, and tensor-parallel models.
"""


def register() -> None:
    """Set the model families, in the order in which models are probed, and add the detection of
    tensor-parallel models.
    """
    from hf_slospec.families.encoder import EncoderDecoders
    from hf_slospec.families.gathered import Gathered
    from hf_slospec.families.ranks import split_ranks_of
    from hf_slospec.families.recurrent import Recurrent
    from hf_slospec.model.family import FAMILIES
    from hf_slospec.model.ranks import split_ranks

    FAMILIES[:] = EncoderDecoders(), Recurrent(), Gathered()
    split_ranks.append(split_ranks_of)
