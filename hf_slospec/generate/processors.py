"""Logits processors for single rows of a call: copies of processors that hold state or arguments
per row, and the processors that draft models apply.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
    """Return whether transformers defines the class of a logits processor, stopping criterion or
    streamer.
    """
    return type(callback).__module__.startswith("transformers.generation.")


def is_users(callback: Any) -> bool:
    """Return whether a logits processor, criterion or streamer runs code of the user."""
    is_ours = library_of(type(callback)) == "hf_slospec"
    calls_users = isinstance(callback, PrefixConstrainedLogitsProcessor)
    return calls_users or not (is_stock(callback) or is_ours)


def copied_for_row(callback: Any) -> Any:
    """Return a deep copy of a user's processor or criterion; the models that it holds are shared,
    not copied.
    """
    return copy.deepcopy(callback, {id(module): module for module in _modules_in(callback, set())})


def _modules_in(value: Any, seen: set[int]) -> Iterator[torch.nn.Module]:
    """Yield the torch modules that an object refers to, directly or in containers, partial
    functions and bound methods.
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
    """OpenAI's presence and frequency penalties, which lower the logits of tokens that occur in the
    output: by ``presence`` once, and by ``frequency`` per occurrence.

    As in vLLM, tokens of the prompt do not count.
    """

    def __init__(self, prompt_len: int, presence: float, frequency: float):
        """``prompt_len``: number of prompt tokens at the beginning of ``input_ids``, padding
        included.
        """
        self.prompt_len = prompt_len
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Subtract the penalties from the scores.

        Args:
            input_ids: [num_rows, length] int64.
            scores: [num_rows, vocab].

        Returns:
            [num_rows, vocab].
        """
        new = input_ids[:, self.prompt_len :]
        counts = torch.zeros_like(scores).scatter_add_(
            1, new, torch.ones_like(new, dtype=scores.dtype)
        )
        return scores - self.frequency * counts - self.presence * (counts > 0)


IGNORE_SEQUENCE = {  # processors that read scores only, not input_ids
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
# Processors that read the length of input_ids only, and the part of it that their scores depend on:
# rows with equal values may be processed in one call.
BY_LENGTH: dict[type, Callable[[Any, int], Hashable]] = {
    ExponentialDecayLengthPenalty: lambda own, length: max(length - own.regulation_start, 0),
    ForcedBOSTokenLogitsProcessor: lambda own, length: length == 1,
    ForcedEOSTokenLogitsProcessor: lambda own, length: length == own.max_length - 1,
    MinLengthLogitsProcessor: lambda own, length: length < own.min_length,
    MinNewTokensLengthLogitsProcessor: (
        lambda own, length: length - own.prompt_length_to_skip < own.min_new_tokens
    ),
    SuppressTokensAtBeginLogitsProcessor: lambda own, length: length == own.begin_index,
}
# Processors that set the logits of constant tokens to -inf, always or if the value above is true.
# Each call compares the whole vocabulary with these tokens.
MASKING = {
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
}


class ConstantMask(LogitsProcessor):
    """Processor of :data:`MASKING` that finds its tokens once instead of in each call."""

    def __init__(self, processor: Any):
        self._processor = processor
        self.ignores_sequence = type(processor) in IGNORE_SEQUENCE
        self._applies: Callable[[Any, int], Hashable] = BY_LENGTH.get(
            type(processor), lambda own, length: True
        )
        self._mask = torch.empty(0, dtype=torch.bool, device="cpu")  # [vocab]

    def __call__(self, input_ids: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, [num_rows, vocab], as the processor would; always a copy."""
        if input_ids is not None and not self._applies(self._processor, input_ids.shape[-1]):
            return scores.clone()
        if (self._mask.shape, self._mask.device) != (scores.shape[-1:], scores.device):
            self._mask = self._processor(input_ids, torch.zeros_like(scores[:1]))[0] < 0
        return torch.where(self._mask, -torch.inf, scores)


READ_ON_DEVICE = {  # processors that read input_ids, or its length, without waiting for the device
    *BY_LENGTH,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
}


def ignore_sequence(processors: list[Any]) -> bool:
    """Return whether no processor reads ``input_ids``."""
    # Exact types, as a subclass may read input_ids.
    return all(
        type(each) in IGNORE_SEQUENCE or (type(each) is ConstantMask and each.ignores_sequence)
        for each in processors
    )


def reads_of_length(processors: Sequence[Any]) -> Callable[[int], Hashable] | None:
    """Return a function of the length of a row that tells which nodes of several rows may be
    processed in one call: those with equal values. None: no two, as a processor reads tokens.
    """
    if not ignore_sequence([p for p in processors if type(p) not in BY_LENGTH]):
        return None
    readers = [(BY_LENGTH[type(p)], p) for p in processors if type(p) in BY_LENGTH]
    return lambda length: tuple([read(processor, length) for read, processor in readers])


def draft_processors(processors: Sequence[Any]) -> list[Any] | None:
    """Return the processors of a row that its drafts apply as well; None if the row's noise cannot
    be known in advance.

    Processors that wait for the device, keep state or run a model are left out, which only lowers
    the acceptance rate. With a processor that runs code of the user the result is None, since that
    code may draw from the same random generator as the noise.
    """
    if any(map(is_users, processors)):
        return None
    return [
        _for_beam(p)
        for p in processors
        if type(p) in IGNORE_SEQUENCE | READ_ON_DEVICE | {JSONConstraint, ConstantMask}
    ]


def draft_grammar(processors: Sequence[Any]) -> DraftGrammar | None:
    """Return the grammar that a row's draft trees follow; None if no processor is a JSON
    constraint.
    """
    return next((p.for_drafts() for p in processors if isinstance(p, JSONConstraint)), None)


def _for_beam(processor: Any) -> Any:
    """Return a processor in a form that accepts several continuations of one row as a batch."""
    if isinstance(processor, JSONConstraint):
        return processor.for_drafts()
    if isinstance(ignored := getattr(processor, "prompt_ignore_length", None), torch.Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = int(ignored)
    return processor


def processors_of_rows(processors: Sequence[Any], num_rows: int) -> list[list[Any]]:
    """Return the call's processors for each row, i.e. for ``[1, length]`` inputs; each must be
    called once per token and in order.

    Processors of transformers are shared by all rows if they have no state, else restricted to the
    row. A user's processors are copied per row, as they may have state; a processor that reads its
    rows' indices in the batch cannot work.
    """
    shared = [ConstantMask(each) if type(each) in MASKING else each for each in processors]
    return [[_for_row(each, row, num_rows) for each in shared] for row in range(num_rows)]


def _for_row(processor: Any, row: int, num_rows: int) -> Any:
    if type(processor) is ConstantMask:
        return processor
    copied: Any = copy.copy(processor)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(
        ignored := copied.prompt_ignore_length, torch.Tensor
    ):
        copied.prompt_ignore_length = ignored[row : row + 1]
        return copied
    if isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        # encoder_input_ids has one row per prompt, not per returned sequence.
        prompt = row * len(processor.encoder_input_ids) // num_rows
        copied.encoder_input_ids = processor.encoder_input_ids[prompt : prompt + 1]
        return copied
    if isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        prompt = row * processor.batch_size // num_rows
        copied.generated_ngrams = processor.generated_ngrams[prompt : prompt + 1]
        copied.batch_size = 1
        return copied
    if type(processor) is PrefixConstrainedLogitsProcessor:  # not a subclass, which may override it
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, tokens: allowed(row, tokens), num_beams=1)
    if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        # The row's part of the negative prompt, and a cache of its own; the model is shared.
        copied.unconditional_context = {
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
    """Whisper's detection of silence for one row. It records one probability per row, which
    Whisper's ``generate`` reads.
    """

    def __init__(self, of_batch: WhisperNoSpeechDetection, row: int):
        self._of_batch = of_batch
        self._row = row

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        shared: Any = self._of_batch
        # The processor runs a forward for all rows of the batch, so it is called for row 0 only.
        if shared.start_of_trans_offset > 1:
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
