"""Logits processors for single rows of a call, where stock's hold state or arguments per row of the batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WhisperNoSpeechDetection,
)

from hf_slospec.generate.callbacks import copied_for_row, is_stock, is_users
from hf_slospec.generate.grammars import DraftGrammar, JSONConstraint

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
READ_ON_DEVICE = {  # read input_ids, or only its length, without waiting for the device
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
}


def ignore_sequence(processors: list[Any]) -> bool:
    """Return whether no processor reads ``input_ids``, so that nodes of several rows may be processed together."""
    return all(type(processor) in IGNORE_SEQUENCE for processor in processors)  # a subclass may do anything


def draft_processors(processors: Sequence[Any]) -> list[Any] | None:
    """Return the processors of a row that its draft applies as well; None if its noise cannot be foreseen.

    Processors that wait for the device, keep state or forward a model are left out, which costs acceptance only. One
    that the user wrote, or that calls the user's function, may draw from the generator that the noise comes from.
    """
    if any(map(is_users, processors)):
        return None
    return [_for_beam(p) for p in processors if type(p) in IGNORE_SEQUENCE | READ_ON_DEVICE | {JSONConstraint}]


def draft_grammar(processors: Sequence[Any]) -> DraftGrammar | None:
    """Return the grammar of a row's drafts; None if no processor keeps the row to one."""
    return next((p.for_drafts() for p in processors if isinstance(p, JSONConstraint)), None)


def _for_beam(processor: Any) -> Any:
    """Return the processor, made to take several continuations of one row."""
    if isinstance(processor, JSONConstraint):
        return processor.for_drafts()
    if isinstance(ignored := getattr(processor, "prompt_ignore_length", None), torch.Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = int(ignored)
    return processor


def processors_of_row(processors: list[Any], row: int, num_rows: int) -> list[Any]:
    """Return the call's processors for ``[1, length]`` inputs of one row, called once per token and in order.

    Those of transformers are stateless or restricted to the row here. A user's are copied per row, as they may have
    state; one that tells rows apart by their index in the batch cannot work.
    """
    return [_for_row(processor, row, num_rows) for processor in processors]


def _for_row(processor: Any, row: int, num_rows: int) -> Any:
    copied: Any = copy.copy(processor)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(
        ignored := copied.prompt_ignore_length, torch.Tensor
    ):
        copied.prompt_ignore_length = ignored[row : row + 1]
        return copied
    if isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        prompt = row * len(processor.encoder_input_ids) // num_rows  # one per prompt, not per returned sequence
        copied.encoder_input_ids = processor.encoder_input_ids[prompt : prompt + 1]
        return copied
    if isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        prompt = row * processor.batch_size // num_rows
        copied.generated_ngrams, copied.batch_size = processor.generated_ngrams[prompt : prompt + 1], 1
        return copied
    if type(processor) is PrefixConstrainedLogitsProcessor:  # a subclass may do anything
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, tokens: allowed(row, tokens), num_beams=1)
    if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        copied.unconditional_context = {  # the row's negative prompt and cache; the model is shared
            name: value[row : row + 1] if isinstance(value, torch.Tensor) and len(value) == num_rows else value
            for name, value in processor.unconditional_context.items()
        }
        return copied
    if isinstance(processor, WhisperNoSpeechDetection):
        return _NoSpeechOfRow(processor, row)
    return processor if is_stateless(processor) or num_rows == 1 else copied_for_row(processor)


class _NoSpeechOfRow:
    """Whisper's detection of silence, which records one probability per row for Whisper's ``generate`` to read."""

    def __init__(self, of_batch: WhisperNoSpeechDetection, row: int):
        self._of_batch, self._row = of_batch, row

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        shared: Any = self._of_batch
        if shared.start_of_trans_offset > 1:  # a forward of the whole batch tells those of all rows
            return scores if self._row else shared(input_ids, scores)
        if input_ids.shape[1] == shared.begin_index:
            own = copy.copy(shared)
            own(input_ids, scores)
            if not isinstance(shared._no_speech_prob, dict):
                shared._no_speech_prob = {}
            shared._no_speech_prob[self._row] = own.no_speech_prob[0]
        return scores


def is_stateless(processor: Any) -> bool:
    """Return whether a processor is known to keep no state between calls."""
    stateful = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
    return is_stock(processor) and not isinstance(processor, stateful)
