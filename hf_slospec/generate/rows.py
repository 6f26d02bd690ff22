"""The rows of a call in the layout of stock ``generate``: stopping criteria, streaming, padding and
the returned sequences.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad as pad_to_right
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.errors import UnsupportedOptionError
from hf_slospec.generate.processors import copied_for_row, is_stock
from hf_slospec.generate.prompt import CallInputs
from hf_slospec.model.ownership import foreign_members
from hf_slospec.model.record import Record
from hf_slospec.model.sampling import StockSampler, check_unchanged
from hf_slospec.model.sequences import Sequences
from hf_slospec.model.tree_mask import chain
from hf_slospec.request.request import Request
from hf_slospec.request.slo import IsOver
from hf_slospec.scheduler.prefill import CHUNK


class TokenIds:
    """A row's token ids as a tensor for stopping criteria, extended in place."""

    def __init__(self, prompt: torch.Tensor):
        """Begin with a prompt, [length] int64, padding included."""
        self._ids = prompt[None]
        self._prompt_len = len(prompt)
        self._length = len(prompt)

    def followed_by(self, tokens: list[int], begin: int) -> torch.Tensor:
        """Append the tokens of ``tokens[begin:]`` that earlier calls have not appended, and return
        prompt and new tokens.

        Returns:
            [1, length] int64, a view that later calls do not change.
        """
        new = tokens[begin + self._length - self._prompt_len :]
        end = self._length + len(new)
        if end > self._ids.shape[1]:
            self._ids = pad_to_right(self._ids, (0, 2 * end - self._ids.shape[1]))
        self._ids[0, self._length : end] = torch.tensor(new, device=self._ids.device)
        self._length = end
        return self._ids[:, :end]


class Rows:
    """The rows of a call: one request each, without padding, which ends by the call's stopping
    criteria.

    Criteria are called after every token, on each row by itself, with the padding that stock
    ``generate`` passes.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        prompt: CallInputs,
        criteria: StoppingCriteriaList,
        record: Record,
        streamer: Any,
        pad: int,
        has_callbacks: bool,
    ):
        """Prepare the rows of a call.

        Args:
            input_ids: [batch, padded_len] int64, as the caller gets them back.
            prompt: what the model processes.
            criteria: stopping criteria of the call.
            record: collects scores, which criteria may read.
            streamer: gets the tokens; None: there is none.
            pad: token that is appended after the end of a row.
            has_callbacks: some logits processor, criterion or streamer is the user's.

        Raises:
            UnsupportedOptionError: no criterion limits the length.
        """
        self.input_ids = input_ids
        self.prompt = prompt
        self.record = record
        self.streamer = streamer
        self.pad = pad
        self.has_callbacks = has_callbacks
        self.requests = list[Request]()  # one per row; set when decoding begins
        self.steps = list[StepEvent]()
        self._num_streamed = 0
        self._eos = {
            int(i) for c in criteria if _is_plain(c, EosTokenCriteria) for i in c.eos_token_id
        }
        lengths = [c.max_length for c in criteria if _is_plain(c, MaxLengthCriteria)]
        if not lengths:  # stock generate adds a MaxLengthCriteria, which a model may remove
            raise UnsupportedOptionError(
                "the model's stopping criteria limit no length, which slo_tpot needs; keep its MaxLengthCriteria, or "
                "use stock generate (fallback=True)"
            )
        self.max_new_tokens = int(min(lengths)) - input_ids.shape[1]
        further = [c for c in criteria if not _is_plain(c, EosTokenCriteria, MaxLengthCriteria)]
        self._joint = [c for c in further if is_joint(c, len(input_ids))]
        self._further = [c for c in further if not is_joint(c, len(input_ids))]
        # Without an end-of-sequence criterion, stock pads no rows: a stopped row continues until
        # all rows have stopped.
        self._is_padded = len(input_ids) == 1 or any(hasattr(c, "eos_token_id") for c in criteria)
        # One dict per joint criterion, and a last one for stopped rows that continue. Each maps a
        # row to the number of its new tokens when it met the criterion (or stopped).
        self._met: list[dict[int, int]] = [{} for _ in (*self._joint, None)]

    @property
    def _end(self) -> int | None:
        """Number of new tokens at which all rows end together; None as long as it is not known."""
        ends = [max(met.values()) for met in self._met if len(met) == len(self.input_ids)]
        return min(ends, default=None)

    def stop_of(self, row: int, prompt_len: int) -> IsOver:
        """Return the function that decides after every token whether a row ends.

        Args:
            row: index of the row.
            prompt_len: tokens of the row's prompt, padding excluded.
        """
        is_only = len(self.input_ids) == 1
        criteria = (
            self._further if is_only else [_for_row(criterion) for criterion in self._further]
        )
        joint = [_joint_for_row(criterion, row) for criterion in self._joint]
        ids = TokenIds(self.input_ids[row])
        prompt = self.input_ids[row].tolist()

        def is_stop(tokens: list[int]) -> bool:
            token = tokens[-1]
            is_over = token in self._eos
            if not criteria and not joint:
                self._stream_token(token)
                return is_over
            num_new = len(tokens) - prompt_len
            input_ids = ids.followed_by(tokens, prompt_len)
            if criteria and (is_only or not is_over):
                # Call all criteria even if one has stopped, as stock does: some count their calls.
                answers = [
                    criterion(input_ids, self.record.scores_of(row)) for criterion in criteria
                ]
                if any(bool(torch.as_tensor(answer, device="cpu").all()) for answer in answers):
                    is_over |= self._is_padded
                    if not is_over:
                        self._met[-1].setdefault(row, num_new)
                if self.has_callbacks:
                    if is_only:  # a criterion may change the last token in place, as in stock
                        tokens[-1] = int(input_ids[0, -1])
                    check_unchanged("stopping_criteria", input_ids, prompt + tokens[prompt_len:])
            self._stream_token(token)
            for met, criterion in zip(self._met, joint, strict=False):
                # Stock pads an ended row and continues to call the criterion on it.
                for num_pads in range(1 + (_lookback(criterion) if is_over else 0)):
                    padded = pad_to_right(input_ids, (0, num_pads), value=self.pad)
                    if row not in met and criterion(padded, self.record.scores_of(row)):
                        met[row] = num_new + num_pads
            return is_over or (self._end is not None and num_new >= self._end)

        return is_stop

    @property
    def num_new(self) -> int:
        """Number of new columns in the output: the longest row's new tokens; shorter rows are
        padded to it.
        """
        longest = max(request.num_emitted for request in self.requests)
        end = self._end
        return longest if end is None else min(end, longest)

    def _new_tokens(self, request: Request, begin: int, end: int) -> list[int]:
        tokens = request.tokens[request.prompt_len :][begin:end]
        return tokens + [self.pad] * (end - begin - len(tokens))

    def begin(self) -> None:
        """Pass the prompts to the streamer."""
        if self.streamer is not None:
            self.streamer.put(self.input_ids.cpu())

    def on_step(self, step: StepEvent) -> None:
        """Record a step, and stream every position that all unfinished rows have reached, as one
        [batch] tensor each, like stock ``generate``.
        """
        self.steps.append(step)
        if self.streamer is None:
            return
        unfinished = [each.num_emitted for each in self.requests if not each.is_finished]
        for position in range(self._num_streamed, min([self.num_new, *unfinished])):
            column = [self._new_tokens(each, position, position + 1)[0] for each in self.requests]
            self.streamer.put(torch.tensor(column, device="cpu"))
            self._num_streamed += 1

    def _stream_token(self, token: int) -> None:
        """Stream a single row's new token at once if the call has callbacks of the user, which may
        expect it before the next token is chosen.
        """
        if self.streamer is not None and len(self.requests) == 1 and self.has_callbacks:
            self.streamer.put(torch.tensor([token], device="cpu"))
            self._num_streamed += 1

    def end(self) -> None:
        """Drop tokens beyond the end of the longest row, and end the stream."""
        for request in self.requests:
            del request.tokens[request.prompt_len + self.num_new :]
        if self.streamer is not None:
            self.streamer.end()

    def length_of(self, new: list[int]) -> int:
        """Return the number of a row's new tokens before its padding, from a row that stock
        ``generate`` returned.
        """
        for position, token in enumerate(new):
            if token in self._eos:
                return position + 1
        length = len(new)
        while self._is_padded and length > 1 and new[length - 1] == self.pad:
            length -= 1
        return length

    def sequences(self) -> torch.Tensor:
        """Return prompts and new tokens, padded.  -> [batch, padded_len + num_new] int64"""
        new = [self._new_tokens(request, 0, self.num_new) for request in self.requests]
        return torch.cat((self.input_ids, torch.tensor(new, device=self.input_ids.device)), dim=-1)

    def forward_padding(self, sequences: Sequences, sampler: StockSampler, lock: FairLock) -> None:
        """Forward the padding that stock ``generate`` appends to finished rows until the longest
        row ends.

        Only needed for calls that return scores, logits or the cache, which contain its entries.
        """
        for request in self.requests:
            tokens = request.tokens[: request.prompt_len] + self._new_tokens(
                request, 0, self.num_new
            )
            with lock:
                sequences.reserve_for(request, len(tokens))
            sequence = sequences.of(request)
            sequence.truncate(len(tokens) - 1)  # the last token has no K/V
            while sequence.length < len(tokens) - 1:
                piece = tokens[sequence.length : len(tokens) - 1][:CHUNK]
                wanted = torch.arange(len(piece) if sampler.record.is_wanted else 0, device="cpu")
                with lock:
                    logits = sequences.forward(
                        [chain(sequences.packed, sequence, piece)], wanted
                    ).logits
                for position, row in enumerate(logits, sequence.length + 1):
                    if position >= request.prompt_len + request.num_emitted:
                        sampler.record_padding(request, tokens[:position], row, tokens[position])
                sequence.length += len(piece)


def _is_plain(criterion: Any, *kinds: type) -> bool:
    """Return whether a criterion is of these classes, without methods that a subclass overrides."""
    return isinstance(criterion, kinds) and not foreign_members([criterion])


def is_joint(criterion: Any, num_rows: int) -> bool:
    """Return whether a criterion ends all rows at the same time, once each row has met it:
    lm-eval's ``MultiTokenEOSCriteria`` and its copies.
    """
    done = getattr(criterion, "done_tracker", None)
    is_known = (
        type(criterion).__name__.endswith("MultiTokenEOSCriteria") and _lookback(criterion) > 0
    )
    return num_rows > 1 and is_known and isinstance(done, list) and len(done) == num_rows


def _lookback(criterion: Any) -> int:
    """Return the number of last tokens that a joint criterion reads."""
    return max(getattr(criterion, name, 0) for name in ("sequence_id_len", "max_sequence_id_len"))


def _joint_for_row(criterion: Any, row: int) -> Any:
    """Return a copy of a joint criterion for one row, with the same tokenizer object."""
    copied = copy.copy(criterion)
    copied.done_tracker = [criterion.done_tracker[row]]
    return copied


def _for_row(criterion: Any) -> Any:
    """Return a criterion for one row: a copy if it is the user's, which may have state."""
    is_stateless = is_stock(criterion) or isinstance(criterion, StopStrings)
    return criterion if is_stateless else copied_for_row(criterion)


def model_end_tokens(config: GenerationConfig) -> list[int]:
    """Return the end-of-sequence tokens of a generation config."""
    ends = config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def until_end(row: list[int], ends: Collection[int]) -> list[int]:
    """Return a row up to and including its first end token."""
    return row[: next((place + 1 for place, token in enumerate(row) if token in ends), len(row))]


def pad_token(config: GenerationConfig) -> int:
    """Return the token that pads rows after their end, from a config that stock ``generate``
    prepared.
    """
    pad = config._pad_token_tensor
    return 0 if pad is None else int(pad)


StopText = Any  # str or bytes, depending on the tokenizer's kind of vocabulary


class _StopVocabulary:
    """Text of every token of a tokenizer, as ``StopStringCriteria`` computes it."""

    def __init__(self, tokenizer: Any):
        self.size = len(tokenizer)
        self.mode = StopStringCriteria._get_stop_string_matching_mode(tokenizer)
        texts, ids = StopStringCriteria.clean_tokenizer_vocab(
            tokenizer, stop_string_matching_mode=self.mode
        )
        self.texts: dict[int, StopText] = dict(zip(ids, texts, strict=True))
        self.beginnings = {text[:end] for text in texts for end in range(1, len(text) + 1)}

    def can_end(self, stop: StopText) -> bool:
        """Return whether a token may complete the stop string: it begins with a suffix of the
        string, or contains the whole string.
        """
        return any(stop[begin:] in self.beginnings for begin in range(len(stop))) or any(
            stop in text for text in self.texts.values()
        )


_known: WeakKeyDictionary[Any, _StopVocabulary] = WeakKeyDictionary()


def _vocabulary_of(tokenizer: Any) -> _StopVocabulary:
    known = _known.get(tokenizer)
    if known is None or known.size != len(tokenizer):  # tokens were added since
        known = _known[tokenizer] = _StopVocabulary(tokenizer)
    return known


class StopStrings(StoppingCriteria):
    """Stopping criterion that stops where ``StopStringCriteria`` does: at the first token that
    completes a stop string.

    ``StopStringCriteria`` first matches every token of the vocabulary with every position of every
    stop string, which takes minutes for a few thousand characters. This class searches the text of
    the last tokens instead.
    """

    per_row = True  # treats every row by itself

    def __init__(self, tokenizer: Any, stop_strings: str | Sequence[str]):
        """Prepare the search.

        Args:
            tokenizer: the tokenizer of the tokens.
            stop_strings: one string or several.

        Raises:
            ValueError: there is no stop string, one is empty, or the tokenizer has no token that
                could complete any of them.
        """
        strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        if not strings or not all(strings):
            raise ValueError("at least one is needed, and none may be empty")
        vocabulary = _vocabulary_of(tokenizer)
        self._texts = vocabulary.texts
        self._stops = StopStringCriteria._get_stop_strings_for_matching(
            tuple(strings), vocabulary.mode
        )
        # Tokens that a stop string may span, as each has at least one character or byte.
        self._max_tokens = max(map(len, self._stops))
        if not any(map(vocabulary.can_end, self._stops)):
            raise ValueError("no token of the tokenizer ends with a part of one of them")

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return for each row whether its last token completes a stop string.  -> [batch] bool"""
        is_complete = [self.ends(row) for row in input_ids[:, -self._max_tokens :].tolist()]
        return torch.tensor(is_complete, device=input_ids.device)

    def ends(self, tokens: list[int]) -> bool:
        """Return whether the last one of these tokens completes a stop string."""
        texts: list[StopText] = []
        for token in reversed(tokens[-self._max_tokens :]):
            # A token without text, such as padding of the vocabulary: no match extends across it.
            if (text := self._texts.get(token)) is None:
                break
            texts.append(text)
        if not texts:
            return False
        before = sum(map(len, texts[1:]))
        joined = texts[0][:0].join(reversed(texts))
        # Search only for matches that end within the last token.
        return any(joined.find(stop, max(before - len(stop) + 1, 0)) >= 0 for stop in self._stops)
