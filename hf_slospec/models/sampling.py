"""Choice of tokens exactly as in transformers' ``generate``, one node at a time and with rows in any order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Chooser
from hf_slospec.engine.request import Request
from hf_slospec.models.memory import is_out_of_memory

# input_ids [1, length] int64 (None if it is never read), scores [num_nodes, vocab] f32 -> scores, same shape
Processor = Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor]
# Choices on the device, [num_choices] int64, and the function that makes choosers of them once the host has read them.
PendingChoices = tuple[torch.Tensor, Callable[[list[int]], list[Chooser]]]
NO_CHOICES = torch.empty(0, dtype=torch.int64)

MAX_BATCHED_LOGITS = 2**20  # of a step; with more of them, a CPU processes only nodes that are reached, one at a time
MAX_CACHED_POSITIONS = 64  # positions whose noise is kept; older noise is drawn again from the generator's saved state


class GeneratorNoise:
    """Noise that ``torch.multinomial(probs, 1)`` would draw, by position and row.

    ``multinomial(p, 1)`` is ``argmax(p / Exp(1) noise)``. ``generate`` draws for the whole batch once per position, so
    drawing [batch, vocab] position after position from the global generator gives every row the same noise as there and
    leaves the generator in the same state, however far ahead single rows are. With a seed, an own generator draws the
    noise that the global one would draw after ``torch.manual_seed(seed)``.
    """

    def __init__(self, batch: int, probs: torch.Tensor, seed: int | None = None):
        """``probs`` [..., vocab]: gives the dtype, device and vocabulary size of the noise."""
        self.shape, self.dtype, self.device = (batch, probs.shape[-1]), probs.dtype, probs.device
        self.num_drawn = 0
        self._has_own_generator = seed is not None
        own = None if seed is None else torch.Generator(probs.device).manual_seed(seed)
        self._generator = own or _default_generator(probs.device)
        self._states: dict[int, torch.Tensor] = {}  # of the generator before each position's draw (5 kB on a CPU)
        self._cached: dict[int, torch.Tensor] = {}  # [batch, vocab] f32 each, oldest draw first

    def at(self, position: int, row: int) -> torch.Tensor:
        """Return the noise for a row's token at a position (0: its first new token).  -> [vocab] f32"""
        while self.num_drawn <= position:
            self._states[self.num_drawn] = self._generator.get_state()
            self._draw(self.num_drawn, self._generator)
            self.num_drawn += 1
        if position not in self._cached:
            self._draw(position, torch.Generator(self.device).set_state(self._states[position]))
        return self._cached[position][row]

    def _draw(self, position: int, generator: torch.Generator) -> None:
        noise = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self._cached[position] = noise.exponential_(1, generator=generator)
        if len(self._cached) > MAX_CACHED_POSITIONS:
            del self._cached[next(iter(self._cached))]

    def forget_before(self, position: int) -> None:
        """Drop the noise of earlier positions, which no row needs again."""
        # States of the global generator are kept for end(): rows may go on beyond the position at which the batch ends.
        for kept in (self._cached, self._states) if self._has_own_generator else (self._cached,):
            for passed in [earlier for earlier in kept if earlier < position]:
                del kept[passed]

    def end(self, num_positions: int) -> None:
        """Reset the generator to its state after ``num_positions`` draws, as ``generate`` leaves it."""
        if num_positions < self.num_drawn:
            self._generator.set_state(self._states[num_positions])


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


class Record:
    """Logits and processed scores of every committed token, as far as the generation config asks for them."""

    def __init__(self, num_rows: int, config: Any):
        is_dict = config.return_dict_in_generate
        # [vocab] each, by row and position
        self._logits = _new_rows(num_rows, is_dict and config.output_logits)
        self._scores = _new_rows(num_rows, is_dict and config.output_scores)

    @property
    def is_wanted(self) -> bool:
        """Return whether logits or scores are recorded."""
        return self._logits is not None or self._scores is not None

    def add(self, row: int, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Record a row's next committed token by its logits and scores, both [vocab]."""
        for rows, value in ((self._logits, logits), (self._scores, scores)):
            if rows is not None:
                rows[row].append(value.clone())  # a view would keep the logits of all nodes in memory

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
    ):
        """Set up the sampler; ``requests``, ``processors`` and ``prompts`` have one entry per row of the batch.

        Args:
            prompts: token ids as processors get them, left padding included.
            ignore_sequence: all rows have the same processors, and none of these reads ``input_ids``.
            seed: noise is that after ``torch.manual_seed(seed)``; None: that of the global generator.
        """
        self.processors, self.do_sample, self.prompts, self.device = processors, do_sample, prompts, device
        self.ignore_sequence, self.record, self.seed = ignore_sequence, record, seed
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
        scores = _processed(self.processors[0], None, raw)
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
            parts = zip(requests, _split(read, num_nodes), raw.split(num_nodes), scores.split(num_nodes), strict=True)
            return [functools.partial(self._recorded_choice, *part) for part in parts]

        return choices, choosers

    def _recorded_choice(
        self, request: Request, choices: list[int], logits: torch.Tensor, scores: torch.Tensor, node: int
    ) -> int:
        self.record.add(self._row[request], logits[node], scores[node])
        return _checked(choices[node])

    def _choose_by_path(self, request: Request, logits: torch.Tensor, node: int) -> int:
        """Return the token after ``node``; the path from the root to it is already committed to ``request.tokens``."""
        scores = self.scores(request, request.tokens, logits[node])
        if self.do_sample:
            return _checked(int(self._drawn(scores[None], [(request.num_emitted, self._row[request])])))
        return int(scores.argmax(-1))

    def scores(self, request: Request, tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Return and record the scores of the token after ``tokens``.

        ``logits`` and the result are [vocab]. Processors may have state: call this once per position, in order.
        """
        raw = logits[None].to(device=self.device, dtype=torch.float32)
        row = self._row[request]
        sequence, processors = [*self.prompts[row], *tokens[request.prompt_len :]], self.processors[row]
        input_ids = torch.tensor([sequence], device=self.device) if processors else None
        scores = _processed(processors, input_ids, raw)[0]
        self.record.add(row, raw[0], scores)
        return scores

    def _drawn(self, scores: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the tokens that ``multinomial`` draws from scores; -1 where it would raise.  -> [num_places] int64

        Args:
            scores: [num_places, vocab].
            places: position and row of each.
        """
        probs = scores.softmax(-1)
        self._noise = self._noise or GeneratorNoise(len(self.prompts), probs, self.seed)
        noise = torch.stack([self._noise.at(*place) for place in places])
        return torch.where(torch.isfinite(probs).all(-1), (probs / noise).argmax(-1), -1)

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
            except BaseException as error:  # of the call's own processors, of any class
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


def _processed(processors: Sequence[Processor], input_ids: torch.Tensor | None, raw: torch.Tensor) -> torch.Tensor:
    scores = raw  # not a copy: if a processor writes into it, the logits that generate returns change too
    for processor in processors:
        scores = processor(input_ids, scores)
    return scores


def _checked(token: int) -> int:
    """Return the token of a node that was reached; only nodes that are not may lack a valid distribution."""
    if token < 0:
        raise RuntimeError("probabilities for sampling contain inf or nan; check the model's logits and processors")
    return token
