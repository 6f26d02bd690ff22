"""Choice of tokens exactly as in transformers' ``generate``, one node at a time and with rows in any order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Chooser
from hf_slospec.engine.request import Request
from hf_slospec.errors import InvalidInputError
from hf_slospec.models.device.memory import is_out_of_memory
from hf_slospec.models.device.transfer import to_device
from hf_slospec.models.noise import GeneratorNoise

# input_ids [1, length] int64 (None if it is never read), scores [num_nodes, vocab] f32 -> scores, same shape
Processor = Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor]
# Choices on the device, [num_choices] int64, and the function that makes choosers of them once the host has read them.
PendingChoices = tuple[torch.Tensor, Callable[[list[int]], list[Chooser]]]
NO_CHOICES = torch.empty(0, dtype=torch.int64)

MAX_BATCHED_LOGITS = 2**20  # logits per step; beyond it, a CPU processes only nodes that are reached, one at a time


class TokenLogprobs(NamedTuple):
    """Log probabilities of a committed token and of the most probable ones at its place, before any processor."""

    logprob: float
    top: list[tuple[int, float]]  # token and log probability, best first

    @classmethod
    def of(cls, logprobs: torch.Tensor, token: int, num_top: int) -> TokenLogprobs:
        """Return those of a token; ``logprobs`` [vocab] are of all tokens."""
        top = logprobs.topk(min(num_top, len(logprobs)))
        return cls(float(logprobs[token]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))


class Record:
    """Logits, processed scores and log probabilities of every committed token, as far as they are asked for."""

    def __init__(self, num_rows: int, config: Any):
        is_dict = config.return_dict_in_generate
        # [vocab] each, by row and position
        self._logits = _new_rows(num_rows, is_dict and config.output_logits)
        self._scores = _new_rows(num_rows, is_dict and config.output_scores)
        self.num_top: int | None = None  # log probabilities to record at each place, besides the token's; None: none
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(num_rows)]

    @property
    def is_wanted(self) -> bool:
        """Return whether anything is recorded."""
        return self._logits is not None or self._scores is not None or self.num_top is not None

    def add(self, row: int, logits: torch.Tensor, scores: torch.Tensor, token: int) -> None:
        """Record a row's next committed token with its logits and scores, both [vocab]."""
        for rows, value in ((self._logits, logits), (self._scores, scores)):
            if rows is not None:
                rows[row].append(value.clone())  # a view would keep the logits of all nodes in memory
        if self.num_top is not None:
            self.logprobs[row].append(TokenLogprobs.of(logits.log_softmax(-1), token, self.num_top))

    def unshared(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits for processors, which may write into them: a copy if log probabilities of them are recorded."""
        return logits if self.num_top is None else logits.clone()

    def scores_of(self, row: int) -> tuple[torch.Tensor, ...] | None:
        """Return a row's scores so far as stopping criteria get them: one [1, vocab] tensor per position."""
        return None if self._scores is None else tuple(scores[None] for scores in self._scores[row])

    def logits(self, num_positions: int) -> tuple[torch.Tensor, ...] | None:
        """Return logits as ``generate`` does: one [batch, vocab] tensor per position; None if not asked for."""
        return _by_position(self._logits, num_positions)

    def scores(self, num_positions: int) -> tuple[torch.Tensor, ...] | None:
        """Return processed scores, in the form of ``logits``."""
        return _by_position(self._scores, num_positions)


def _new_rows(num_rows: int, is_wanted: bool) -> list[list[torch.Tensor]] | None:
    return [[] for _ in range(num_rows)] if is_wanted else None


def _by_position(rows: list[list[torch.Tensor]] | None, num_positions: int) -> tuple[torch.Tensor, ...] | None:
    if rows is None:
        return None
    return tuple(torch.stack(column) for column in zip(*(row[:num_positions] for row in rows), strict=True))


class StockSampler:
    """Sampler of one call's rows: greedy or sampling, after the call's logits processors, as in ``generate``."""

    def __init__(
        self,
        requests: Sequence[Request],
        processors: Sequence[Sequence[Processor]],
        do_sample: bool,
        prompts: Sequence[Sequence[int]],
        device: torch.device,
        ignore_sequence: bool,
        record: Record,
        seed: int | None = None,
        sharing: int = 1,
    ):
        """Set up the sampler; ``requests``, ``processors`` and ``prompts`` have one entry per row of the batch.

        Args:
            prompts: token ids as processors get them, left padding included.
            ignore_sequence: all rows have the same processors, and none of these reads ``input_ids``.
            seed: noise is that after ``torch.manual_seed(seed)``; None: that of the global generator.
            sharing: samplers that share the memory for noise.
        """
        self.processors, self.do_sample, self.prompts, self.device = processors, do_sample, prompts, device
        self.ignore_sequence, self.record, self.seed = ignore_sequence, record, seed
        self.sharing = sharing
        self._row = {request: row for row, request in enumerate(requests)}
        self._noise: GeneratorNoise | None = None

    def choose(self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree]) -> PendingChoices:
        if not requests:  # all of them are in prefill
            return _nothing_pending([])
        if self._noise is not None:
            self._noise.forget_before(min(request.num_emitted for request in requests))
        num_nodes = [tree.num_nodes for tree in trees]
        is_cheap = logits.numel() <= MAX_BATCHED_LOGITS or not (self.processors[0] or self.do_sample)
        if self.ignore_sequence and (is_cheap or logits.device.type != "cpu"):
            return self._choose_together(requests, logits, trees, num_nodes)
        pairs = zip(requests, logits.split(num_nodes), strict=True)
        return _nothing_pending([functools.partial(self._choose_by_path, *pair) for pair in pairs])

    def _choose_together(
        self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree], num_nodes: list[int]
    ) -> PendingChoices:
        """Choose for all nodes at once, as a choice depends on nothing of the path to its node but the position."""
        raw = logits.to(device=self.device, dtype=torch.float32)
        scores = processed(self.processors[0], None, self.record.unshared(raw))
        if self.do_sample:
            places = [
                (request.num_emitted + int(depth), self._row[request])
                for request, tree in zip(requests, trees, strict=True)
                for depth in tree.depths
            ]
            choices = self._drawn(scores, places)
        else:
            choices = scores.argmax(-1)

        def choosers(read: list[int]) -> list[Chooser]:
            own = _split(read, num_nodes)
            if not self.record.is_wanted:  # every look at a node would be work for the device
                return [functools.partial(_choice, choices) for choices in own]
            parts = zip(requests, own, raw.split(num_nodes), scores.split(num_nodes), strict=True)
            return [functools.partial(self._recorded_choice, *part) for part in parts]

        return choices, choosers

    def _recorded_choice(
        self, request: Request, choices: list[int], logits: torch.Tensor, scores: torch.Tensor, node: int
    ) -> int:
        token = _choice(choices, node)
        self.record.add(self._row[request], logits[node], scores[node], token)
        return token

    def _choose_by_path(self, request: Request, logits: torch.Tensor, node: int) -> int:
        """Return the token after ``node``; the path from the root to it is already committed to ``request.tokens``."""
        row = self._row[request]
        raw, scores = self._scores(request, request.tokens, logits[node])
        if self.do_sample:
            token = _checked(int(self._drawn(scores[None], [(request.num_emitted, row)])))
        else:
            token = int(scores.argmax(-1))
        self.record.add(row, raw, scores, token)
        return token

    def record_padding(self, request: Request, tokens: Sequence[int], logits: torch.Tensor, token: int) -> None:
        """Record the padding token after ``tokens``, whose logits are [vocab]."""
        self.record.add(self._row[request], *self._scores(request, tokens, logits), token)

    def _scores(
        self, request: Request, tokens: Sequence[int], logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and scores of the token after ``tokens``, both [vocab] f32.

        Processors may have state: call this once per position, in order.
        """
        raw = logits[None].to(device=self.device, dtype=torch.float32)
        processors = self.processors[self._row[request]]
        text = self.text(request, tokens) if processors else None
        return raw[0], processed(processors, text, self.record.unshared(raw))[0]

    def text(self, request: Request, tokens: Sequence[int]) -> torch.Tensor:
        """Return a request's tokens as processors get them, left padding included.  -> [1, length] int64"""
        text = [*self.prompts[self._row[request]], *tokens[request.prompt_len :]]
        ids: torch.Tensor = to_device(torch.tensor([text]), self.device)
        return ids

    def noise_after(self, requests: Sequence[Request], depth: int) -> torch.Tensor:
        """Return the noise that will choose tokens after nodes at this depth, a copy.  -> [num_requests, vocab] f32

        The requests must have a token already, as the first choice tells the size of the vocabulary.
        """
        assert self._noise is not None, "the noise of a request is known from its first token on"
        places = [(request.num_emitted + depth, self._row[request]) for request in requests]
        return self._noise.rows(places, is_drawn=False)

    def _drawn(self, scores: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the tokens that ``multinomial`` draws from scores; -1 where it would raise.  -> [num_drawn] int64

        Args:
            scores: [num_drawn, vocab].
            places: position and row of each.
        """
        probs = scores.softmax(-1)
        self._noise = self._noise or GeneratorNoise(len(self.prompts), probs, self.seed, self.sharing)
        return torch.where(torch.isfinite(probs).all(-1), (probs / self._noise.rows(places)).argmax(-1), -1)

    def end(self, num_positions: int) -> None:
        """Leave the global generator as ``generate`` does after ``num_positions`` tokens per row."""
        if self._noise is not None:
            self._noise.end(num_positions)


class GreedySampler:
    """Sampler of the most probable token, without processors."""

    def choose(self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree]) -> PendingChoices:
        num_nodes = [tree.num_nodes for tree in trees]
        return logits.argmax(-1), lambda choices: [own.__getitem__ for own in _split(choices, num_nodes)]


GREEDY = GreedySampler()


class RequestSamplers:
    """Samplers of requests of different calls; requests without one are greedy.

    An error in one sampler is raised by the choosers of its own requests only.
    """

    def __init__(self) -> None:
        self._of: dict[Request, StockSampler] = {}

    def add(self, request: Request, sampler: StockSampler) -> None:
        """Choose the tokens of a request by its own sampler."""
        self._of[request] = sampler

    def remove(self, request: Request) -> None:
        """Drop the sampler of a request, if it has one."""
        self._of.pop(request, None)

    def choose(self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree]) -> PendingChoices:
        groups: dict[StockSampler | GreedySampler, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(self._of.get(request, GREEDY), []).append(place)
        by_request = logits.split([tree.num_nodes for tree in trees])
        pending: list[PendingChoices] = []
        for sampler, places in groups.items():
            own = logits if len(places) == len(requests) else torch.cat([by_request[place] for place in places])
            try:
                pending.append(sampler.choose([requests[p] for p in places], own, [trees[p] for p in places]))
            except BaseException as error:  # any class: the call's processors raised it
                if is_out_of_memory(error):
                    raise
                pending.append(_nothing_pending([functools.partial(_raise, error)] * len(places)))

        def choosers(read: list[int]) -> list[Chooser]:
            chooser_at: dict[int, Chooser] = {}
            parts = _split(read, [len(choices) for choices, _ in pending])
            for places, part, (_, make) in zip(groups.values(), parts, pending, strict=True):
                chooser_at.update(zip(places, make(part), strict=True))
            return [chooser_at[place] for place in range(len(requests))]

        all_choices = [choices.to(logits.device) for choices, _ in pending if len(choices)]
        return torch.cat(all_choices) if all_choices else NO_CHOICES, choosers


def _nothing_pending(choosers: list[Chooser]) -> PendingChoices:
    """Return pending choices of choosers that need nothing from the device."""
    return NO_CHOICES, lambda _: choosers


def _split(tokens: list[int], sizes: Sequence[int]) -> list[list[int]]:
    rest = iter(tokens)
    return [list(itertools.islice(rest, size)) for size in sizes]


def _raise(error: BaseException, node: int) -> int:
    raise error


def processed(processors: Sequence[Processor], input_ids: torch.Tensor | None, raw: torch.Tensor) -> torch.Tensor:
    """Return raw scores after all processors.  -> [num_nodes, vocab] f32

    Raises:
        InvalidInputError: a processor returns something else than scores.
    """
    scores = raw  # not a copy: if a processor writes into it, the logits that generate returns change too
    for processor in processors:
        scores = processor(input_ids, scores)
        # Fewer columns are fine, as in stock generate: the tokens behind them cannot be chosen.
        if not isinstance(scores, torch.Tensor) or scores.ndim != 2 or len(scores) != len(raw):
            found = list(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
            name = type(processor).__name__
            raise InvalidInputError(
                f"logits_processor {name} must return scores of shape {list(raw.shape)}, got {found}"
            )
    return scores


def _choice(choices: list[int], node: int) -> int:
    return _checked(choices[node])


def _checked(token: int) -> int:
    """Return the token of a node that was reached; only nodes that are not may lack a valid distribution."""
    if token < 0:
        raise RuntimeError("probabilities for sampling contain inf or nan; check the model's logits and processors")
    return token
