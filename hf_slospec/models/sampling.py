"""Choosing tokens exactly as transformers' ``generate`` would, one node at a time and in any order of rows."""

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

# input_ids [1, length] int64 (None for those that never read it), scores [num_rows, vocab] f32 -> scores, same shape
Processor = Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor]
# What a sampler asks the device for, [num_choices] int64, and what makes the choosers once the host has read that.
PendingChoices = tuple[torch.Tensor, Callable[[list[int]], list[Chooser]]]
NO_CHOICES = torch.empty(0, dtype=torch.int64)

MAX_BATCHED_LOGITS = 2**20  # logits of a step that a CPU processes at once; above, only those of nodes that are reached
MAX_CACHED_POSITIONS = (
    64  # positions whose noise is at hand; older ones are drawn again from the generator's state at their time
)


class GeneratorNoise:
    """The noise ``torch.multinomial(probs, 1)`` would draw, by position.

    ``multinomial(p, 1)`` is ``argmax(p / Exp(1) noise)``. ``generate`` draws for the whole batch once per position, so
    drawing [batch, vocab] position after position from the global generator gives every row its own
    noise and leaves the generator where ``generate`` leaves it, however far ahead single rows are. With a seed there is
    a generator of its own, and the noise is what the global one would give after ``torch.manual_seed(seed)``.
    """

    def __init__(self, batch: int, probs: torch.Tensor, seed: int | None = None):
        """``probs`` [..., vocab]: of the dtype and vocabulary that tokens are drawn from."""
        self.shape, self.dtype, self.device = (batch, probs.shape[-1]), probs.dtype, probs.device
        self.num_drawn = 0
        self._has_own = seed is not None
        own = None if seed is None else torch.Generator(probs.device).manual_seed(seed)
        self._generator = own or _default_generator(probs.device)
        self._states: dict[int, torch.Tensor] = {}  # of the generator, before each position was drawn (5 kB on a CPU)
        self._remembered: dict[int, torch.Tensor] = {}  # [batch, vocab] f32 each, oldest draw first

    def at(self, position: int, row: int) -> torch.Tensor:
        """Noise for a row's token at a position (0: its first new token).  -> [vocab] f32"""
        while self.num_drawn <= position:
            self._states[self.num_drawn] = self._generator.get_state()
            self._draw(self.num_drawn, self._generator)
            self.num_drawn += 1
        if position not in self._remembered:
            self._draw(position, torch.Generator(self.device).set_state(self._states[position]))
        return self._remembered[position][row]

    def _draw(self, position: int, generator: torch.Generator) -> None:
        noise = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self._remembered[position] = noise.exponential_(1, generator=generator)
        if len(self._remembered) > MAX_CACHED_POSITIONS:
            del self._remembered[next(iter(self._remembered))]

    def forget_before(self, position: int) -> None:
        """No row will ask for an earlier position again."""
        # The global generator may have to go back further: rows are written on beyond where a batch turns out to end.
        for kept in (self._remembered, self._states) if self._has_own else (self._remembered,):
            for passed in [at for at in kept if at < position]:
                del kept[passed]

    def end(self, num_positions: int) -> None:
        """Leave the generator as it was before any noise beyond the positions that were generated."""
        if num_positions < self.num_drawn:
            self._generator.set_state(self._states[num_positions])


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


class Record:
    """Logits, processed scores or both of every committed token, as far as a generation config wants them back."""

    def __init__(self, num_rows: int, config: Any):
        is_dict = config.return_dict_in_generate
        # by row and position: [vocab] each
        self._logits = _new_rows(num_rows, is_dict and config.output_logits)
        self._scores = _new_rows(num_rows, is_dict and config.output_scores)

    @property
    def is_wanted(self) -> bool:
        return self._logits is not None or self._scores is not None

    def add(self, row: int, logits: torch.Tensor, scores: torch.Tensor) -> None:
        for rows, value in ((self._logits, logits), (self._scores, scores)):
            if rows is not None:
                rows[row].append(value.clone())  # a view would keep all nodes of the step alive

    def scores_of(self, row: int) -> tuple[torch.Tensor, ...] | None:
        """A row's scores so far, as criteria are given them: one [1, vocab] tensor per position."""
        return None if self._scores is None else tuple(scores[None] for scores in self._scores[row])

    def logits(self, num_positions: int) -> tuple[torch.Tensor, ...] | None:
        """As stock returns them: one [batch, vocab] tensor per position; None if they were not asked for."""
        return _by_position(self._logits, num_positions)

    def scores(self, num_positions: int) -> tuple[torch.Tensor, ...] | None:
        return _by_position(self._scores, num_positions)


def _new_rows(num_rows: int, is_wanted: bool) -> list[list[torch.Tensor]] | None:
    return [[] for _ in range(num_rows)] if is_wanted else None


def _by_position(rows: list[list[torch.Tensor]] | None, num_positions: int) -> tuple[torch.Tensor, ...] | None:
    if rows is None:
        return None
    return tuple(torch.stack(column) for column in zip(*(row[:num_positions] for row in rows), strict=True))


class StockSampler:
    """How the rows of one call choose: greedily or sampling, after its logits processors, as ``generate`` does it."""

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
        """Per row of the batch: its request, its processors, and its prompt as these see it, left padding included.

        With ``ignore_sequence`` all rows have the same processors, and none of them reads ``input_ids``. Noise is that
        of the global generator, or what it would be after ``torch.manual_seed(seed)``.
        """
        self.processors, self.do_sample, self.prompts, self.device = processors, do_sample, prompts, device
        self.ignore_sequence, self.record, self.seed = ignore_sequence, record, seed
        self._row = {request: row for row, request in enumerate(requests)}
        self._noise: GeneratorNoise | None = None

    def choose(self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree]) -> PendingChoices:
        if not requests:  # all still read their prompts
            return _nothing_pending([])
        if self._noise is not None:
            self._noise.forget_before(min(request.num_emitted for request in requests))
        num_nodes = [tree.num_nodes for tree in trees]
        is_small = (
            logits.device.type != "cpu"
            or logits.numel() <= MAX_BATCHED_LOGITS
            or not (self.processors[0] or self.do_sample)
        )
        if self.ignore_sequence and is_small:
            return self._choose_together(requests, logits, trees, num_nodes)
        rows = zip(requests, logits.split(num_nodes), strict=True)
        return _nothing_pending([functools.partial(self._choose_by_path, *row) for row in rows])

    def _choose_together(
        self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree], num_nodes: list[int]
    ) -> PendingChoices:
        """All nodes together: nothing of a choice depends on the way to its node but its position."""
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
            rows = zip(requests, _split(read, num_nodes), raw.split(num_nodes), scores.split(num_nodes), strict=True)
            return [functools.partial(self._recorded_choice, *row) for row in rows]

        return choices, choosers

    def _recorded_choice(
        self, request: Request, choices: list[int], logits: torch.Tensor, scores: torch.Tensor, node: int
    ) -> int:
        self.record.add(self._row[request], logits[node], scores[node])
        return _checked(choices[node])

    def _choose_by_path(self, request: Request, logits: torch.Tensor, node: int) -> int:
        """The token after ``node``, whose path from the root has just been committed to ``request.tokens``."""
        scores = self.scores(request, request.tokens, logits[node])
        if self.do_sample:
            return _checked(int(self._drawn(scores[None], [(request.num_emitted, self._row[request])])))
        return int(scores.argmax(-1))

    def scores(self, request: Request, tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """Scores of the token after ``tokens``, recorded; called once per position and in order.

        ``logits`` and the result are [vocab]; processors may remember what they see.
        """
        raw = logits[None].to(device=self.device, dtype=torch.float32)
        row = self._row[request]
        text = [*self.prompts[row], *tokens[request.prompt_len :]]
        processors = self.processors[row]
        input_ids = torch.tensor([text], device=self.device) if processors else None
        scores = _processed(processors, input_ids, raw)[0]
        self.record.add(row, raw[0], scores)
        return scores

    def _drawn(self, scores: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
        """What ``multinomial`` draws from scores for some positions and rows; -1 where it would raise.

        ``scores`` [num_places, vocab]  ->  [num_places] int64
        """
        probs = scores.softmax(-1)
        self._noise = self._noise or GeneratorNoise(len(self.prompts), probs, self.seed)
        noise = torch.stack([self._noise.at(*place) for place in places])
        return torch.where(torch.isfinite(probs).all(-1), (probs / noise).argmax(-1), -1)

    def end(self, num_positions: int) -> None:
        """``num_positions`` tokens were generated per row."""
        if self._noise is not None:
            self._noise.end(num_positions)


class GreedySampler:
    """The most probable token, whoever asks."""

    def choose(self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree]) -> PendingChoices:
        num_nodes = [tree.num_nodes for tree in trees]
        return logits.argmax(-1), lambda choices: [own.__getitem__ for own in _split(choices, num_nodes)]


GREEDY = GreedySampler()


class RequestSamplers:
    """The samplers of requests that came by different calls; those without one choose greedily.

    What one of them raises is kept for its own requests to meet; the others choose on.
    """

    def __init__(self) -> None:
        self._of: dict[Request, StockSampler] = {}

    def add(self, request: Request, sampler: StockSampler) -> None:
        self._of[request] = sampler

    def remove(self, request: Request) -> None:
        self._of.pop(request, None)

    def choose(self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree]) -> PendingChoices:
        groups: dict[StockSampler | GreedySampler, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(self._of.get(request, GREEDY), []).append(place)
        rows = logits.split([tree.num_nodes for tree in trees])
        asked: list[PendingChoices] = []
        for sampler, places in groups.items():
            own = logits if len(places) == len(requests) else torch.cat([rows[place] for place in places])
            try:
                asked.append(sampler.choose([requests[p] for p in places], own, [trees[p] for p in places]))
            except BaseException as error:  # whatever a call's own processors raise, its requests meet
                if is_out_of_memory(error):
                    raise
                asked.append(_nothing_pending([functools.partial(_raise, error)] * len(places)))

        def choosers(read: list[int]) -> list[Chooser]:
            of: dict[int, Chooser] = {}
            parts = _split(read, [len(own) for own, _ in asked])
            for places, part, (_, make) in zip(groups.values(), parts, asked, strict=True):
                of.update(zip(places, make(part), strict=True))
            return [of[place] for place in range(len(requests))]

        own = [chosen.to(logits.device) for chosen, _ in asked if len(chosen)]
        return torch.cat(own) if own else NO_CHOICES, choosers


def _nothing_pending(choosers: list[Chooser]) -> PendingChoices:
    return NO_CHOICES, lambda _: choosers


def _split(read: list[int], sizes: Sequence[int]) -> list[list[int]]:
    left = iter(read)
    return [list(itertools.islice(left, size)) for size in sizes]


def _raise(error: BaseException, node: int) -> int:
    raise error


def _processed(processors: Sequence[Processor], input_ids: torch.Tensor | None, raw: torch.Tensor) -> torch.Tensor:
    scores = raw  # a processor may write into it; what stock returns as logits then shows that too
    for processor in processors:
        scores = processor(input_ids, scores)
    return scores


def _checked(token: int) -> int:
    """Nodes that no request reaches may hold anything; one that is reached must have a distribution."""
    if token < 0:
        raise RuntimeError("sampling met probabilities that are inf or nan; check the model's logits and processors")
    return token
