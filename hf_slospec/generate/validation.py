"""Checks of what stock ``generate`` prepared for its decoding method: errors name the argument, the
problem and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMode, MaxTimeCriteria, StoppingCriteriaList

from hf_slospec.errors import UnsupportedModelError, UnsupportedOptionError
from hf_slospec.families.encoder import EncoderInputs, decoder_inputs
from hf_slospec.generate.arguments import check_cache
from hf_slospec.generate.images import names_beside_text
from hf_slospec.generate.stock import StockCall
from hf_slospec.model.checked_model import CheckedModel
from hf_slospec.model.ownership import foreign_members
from hf_slospec.model.properties import CACHE_NAMES, given_cache

# Keyword arguments from stock that the package handles, or that do not affect the output.
PREPARED = {
    *CACHE_NAMES,
    "attention_mask",
    "inputs_embeds",
    "labels",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "position_ids",
    "use_cache",
}


def validated_inputs(
    checked: CheckedModel, stock: StockCall
) -> tuple[dict[str, Any], list[str], EncoderInputs | None]:
    """Return the decoder's inputs that stock ``generate`` prepared, the names of those that are
    images, audio or video, and the encoder's inputs.

    Raises:
        UnsupportedModelError, UnsupportedOptionError: they cannot be speculated.
    """
    model = checked.model
    _, processors, criteria, config, inputs, _ = stock
    check_cache(*given_cache(inputs), is_prepared=True)
    if foreign := foreign_members((processors, criteria)):
        raise UnsupportedModelError(
            f"{type(model).__name__} decodes with lists of processors or criteria that are not transformers' own "
            f"({', '.join(foreign)}), which speculation does not call; return a LogitsProcessorList and a "
            "StoppingCriteriaList, or call generate without slo_tpot"
        )
    names: list[str] = []
    encoder = None
    if model.config.is_encoder_decoder:
        inputs, encoder = decoder_inputs(inputs), EncoderInputs(model, stock.inputs, inputs)
    else:
        names = names_beside_text(model, {k: v for k, v in inputs.items() if k not in PREPARED})
        inputs = inputs if names else _without_token_types(inputs, checked)
    _check_options(config, inputs, {*PREPARED, *names, "mm_token_type_ids"})
    _check_ranks(checked, processors, criteria)
    return inputs, names, encoder


def _check_options(config: GenerationConfig, inputs: dict[str, Any], supported: set[str]) -> None:
    """Refuse options that tree speculation cannot honour."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedOptionError(
            f"slo_tpot works with greedy decoding and sampling, not with {mode.value.replace('_', ' ')}; "
            "set num_beams=1 (and no other search option), or call generate without slo_tpot"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name, False):
            raise UnsupportedOptionError(
                f"{name}=True is not available with slo_tpot: stock returns them per forward of one token; "
                "call generate without slo_tpot"
            )
    is_given = {k for k, v in inputs.items() if v is not None and not (type(v) is dict and not v)}
    if extra := sorted(is_given - supported):
        raise UnsupportedOptionError(
            f"{', '.join(extra)} cannot be combined with slo_tpot; leave it out"
        )


def _without_token_types(model_kwargs: dict[str, Any], checked: CheckedModel) -> dict[str, Any]:
    """Return the inputs of a text without token types, as tokenizers of BERT write them.

    Raises:
        UnsupportedOptionError: the types change what the model computes.
    """
    types = model_kwargs.get("token_type_ids")
    if types is None:
        return model_kwargs
    if checked.ranks.is_led or bool(types.any()) or not checked.ignores_zero_types:
        raise UnsupportedOptionError(
            f"token_type_ids cannot be combined with slo_tpot where they change what {type(checked.model).__name__} "
            "computes; only zeros that mean the same as none are taken, so call generate without slo_tpot"
        )
    return {name: value for name, value in model_kwargs.items() if name != "token_type_ids"}


def _check_ranks(
    checked: CheckedModel, processors: Sequence[Any], criteria: StoppingCriteriaList
) -> None:
    """Refuse what the processes of a tensor-parallel model would not do alike."""
    if checked.ranks.num_deciding > 1 and any(isinstance(c, MaxTimeCriteria) for c in criteria):
        raise UnsupportedOptionError(
            "max_time cannot be combined with slo_tpot and a tensor-parallel model, whose processes would stop at "
            "different tokens; leave it out, and limit the output by max_new_tokens"
        )
    for each in processors if checked.ranks.is_led else ():
        held = getattr(each, "__dict__", {}).values()
        if any(isinstance(value, torch.nn.Module) for value in held):
            raise UnsupportedOptionError(
                f"{type(each).__name__} forwards a model, and the batcher of a tensor-parallel model runs processors "
                "in its first process alone; leave out what asks for it, such as guidance_scale"
            )
