"""Logits processors that hold something per row of the batch, as they treat a single row."""

from __future__ import annotations

import copy
from typing import Any

from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)


def processors_of_row(processors: list[Any], row: int, num_rows: int) -> list[Any]:
    """The call's processors, each ready for ``[1, length]`` inputs of this row; only those that must be are copied."""
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
    return processor
