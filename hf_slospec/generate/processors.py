"""Logits processors that hold something per row of the batch, as they treat a single row."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

IGNORE_SEQUENCE = {
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
}


def ignore_sequence(processors: list[Any]) -> bool:
    """Whether no processor reads ``input_ids``, so that any nodes of any rows may be processed together."""
    return all(type(processor) in IGNORE_SEQUENCE for processor in processors)  # a subclass may do anything


def processors_of_row(processors: list[Any], row: int, num_rows: int) -> list[Any]:
    """The call's processors, each ready for ``[1, length]`` inputs of this row, once per token and in order.

    Transformers' own are stateless or cut to the row here. Others get a copy per row, in case they remember something;
    one that tells rows apart by their index in the batch cannot work.
    """
    return [_of_row(processor, row, num_rows) for processor in processors]


def _of_row(processor: Any, row: int, num_rows: int) -> Any:
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and hasattr(processor.prompt_ignore_length, "shape"):
        own = copy.copy(processor)
        own.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        return own
    if isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        own = copy.copy(processor)
        prompt = row * len(processor.encoder_input_ids) // num_rows  # prompts are not repeated for their sequences
        own.encoder_input_ids = processor.encoder_input_ids[prompt : prompt + 1]
        return own
    if isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        own = copy.copy(processor)
        prompt = row * processor.batch_size // num_rows
        own.generated_ngrams, own.batch_size = processor.generated_ngrams[prompt : prompt + 1], 1
        return own
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, tokens: allowed(row, tokens), num_beams=1)
    if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        own = copy.copy(processor)  # of the row's own negative prompt and its cache, of the same model
        own.unconditional_context = {
            name: value[row : row + 1] if isinstance(value, torch.Tensor) and len(value) == num_rows else value
            for name, value in processor.unconditional_context.items()
        }
        return own
    return processor if is_stateless(processor) or num_rows == 1 else copy.deepcopy(processor)


def is_stateless(processor: Any) -> bool:
    """Whether a processor is known to remember nothing from one call to the next."""
    remembers = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
    return type(processor).__module__ == logits_process.__name__ and not isinstance(processor, remembers)
