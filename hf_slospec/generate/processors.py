"""Logits processors for single rows of a call, where stock's hold state or arguments per row of the
batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from transformers.generation import LogitsProcessor
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

from hf_slospec.generate.grammars import DraftGrammar, JSONConstraint
from hf_slospec.model.whose_code import library_of


def is_stock(callback: Any) -> bool:
    """Return whether transformers defines the class of a callback."""
    return type(callback).__module__.startswith("transformers.generation.")


def is_users(callback: Any) -> bool:
    """Return whether the user wrote a callback, or a function that it calls."""
    is_ours = library_of(type(callback)) == "hf_slospec"
    calls_users = isinstance(callback, PrefixConstrainedLogitsProcessor)
    return calls_users or not (is_stock(callback) or is_ours)


def copied_for_row(callback: Any) -> Any:
    """Return a deep copy of a user's callback that shares the models it holds."""
    return copy.deepcopy(callback, {id(module): module for module in _modules_in(callback, set())})


def _modules_in(value: Any, seen: set[int]) -> Iterator[torch.nn.Module]:
    """Yield the modules that an object holds, in containers, partial functions and bound methods,
    too.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Module):
        yield value
    elif isinstance(value, Mapping):
        for held in value.values():
            yield from _modules_in(held, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for held in value:
            yield from _modules_in(held, seen)
    elif isinstance(value, MethodType):
        yield from _modules_in(value.__self__, seen)
    elif isinstance(value, functools.partial):
        yield from _modules_in((value.func, value.args, value.keywords), seen)
    elif not isinstance(value, (type, FunctionType, ModuleType, torch.Tensor)):
        yield from _modules_in(getattr(value, "__dict__", {}), seen)


class OccurrencePenalties(LogitsProcessor):
    """Processor that lowers the logits of tokens in the output: by one penalty per occurrence, by
    the other once.

    Source: OpenAI's API reference. Tokens of the prompt do not count, as in vLLM.
    """

    def __init__(self, prompt_len: int, presence: float, frequency: float):
        """``prompt_len``: tokens of the prompt, padding included."""
        self.prompt_len = prompt_len
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with penalties, [num_rows, vocab]; ``input_ids`` [num_rows, length]
        int64.
        """
        new = input_ids[:, self.prompt_len :]
        counts = torch.zeros_like(scores).scatter_add_(
            1, new, torch.ones_like(new, dtype=scores.dtype)
        )
        return scores - self.frequency * counts - self.presence * (counts > 0)


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
    """Return whether no processor reads ``input_ids``, so that nodes of several rows may be
    processed together.
    """
    return all(
        type(processor) in IGNORE_SEQUENCE for processor in processors
    )  # a subclass may do anything


def draft_processors(processors: Sequence[Any]) -> list[Any] | None:
    """Return the processors of a row that its draft applies as well; None if its noise cannot be
    foreseen.

    Processors that wait for the device, keep state or forward a model are left out, which costs
    acceptance only. One that the user wrote, or that calls the user's function, may draw from the
    generator that the noise comes from."""
    if any(map(is_users, processors)):
        return None
    return [
        _for_beam(p)
        for p in processors
        if type(p) in IGNORE_SEQUENCE | READ_ON_DEVICE | {JSONConstraint}
    ]


def draft_grammar(processors: Sequence[Any]) -> DraftGrammar | None:
    """Return the grammar that constrains a row's drafts; None without a JSON constraint."""
    return next((p.for_drafts() for p in processors if isinstance(p, JSONConstraint)), None)


def _for_beam(processor: Any) -> Any:
    """Return the processor in a form that accepts several continuations of one row."""
    if isinstance(processor, JSONConstraint):
        return processor.for_drafts()
    if isinstance(ignored := getattr(processor, "prompt_ignore_length", None), torch.Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = int(ignored)
    return processor


def processors_of_row(processors: list[Any], row: int, num_rows: int) -> list[Any]:
    """Return the call's processors for ``[1, length]`` inputs of one row, called once per token and
    in order.

    Those of transformers are stateless or restricted to the row here. A user's are copied per row,
    as they may have state; one that tells rows apart by their index in the batch cannot work.
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
        prompt = (
            row * len(processor.encoder_input_ids) // num_rows
        )  # one per prompt, not per returned sequence
        copied.encoder_input_ids = processor.encoder_input_ids[prompt : prompt + 1]
        return copied
    if isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        prompt = row * processor.batch_size // num_rows
        copied.generated_ngrams = processor.generated_ngrams[prompt : prompt + 1]
        copied.batch_size = 1
        return copied
    if type(processor) is PrefixConstrainedLogitsProcessor:  # a subclass may do anything
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, tokens: allowed(row, tokens), num_beams=1)
    if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        copied.unconditional_context = {  # the row's negative prompt and cache; the model is shared
            name: value[row : row + 1]
            if isinstance(value, torch.Tensor) and len(value) == num_rows
            else value
            for name, value in processor.unconditional_context.items()
        }
        return copied
    if isinstance(processor, WhisperNoSpeechDetection):
        return _NoSpeechOfRow(processor, row)
    return processor if is_stateless(processor) or num_rows == 1 else copied_for_row(processor)


class _NoSpeechOfRow:
    """Whisper's detection of silence, which records one probability per row for Whisper's
    ``generate`` to read.
    """

    def __init__(self, of_batch: WhisperNoSpeechDetection, row: int):
        self._of_batch = of_batch
        self._row = row

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
