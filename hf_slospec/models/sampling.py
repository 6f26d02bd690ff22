"""Choosing tokens exactly as transformers' ``generate`` would, one node at a time and in any order of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from hf_slospec.engine.protocols import Chooser
from hf_slospec.engine.request import Request

# input_ids [1, length] int64, scores [1, vocab] f32 -> scores [1, vocab] f32
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


KEPT = 64  # positions whose noise is kept; older ones are drawn again from the generator's state at their time


class GeneratorNoise:
    """The noise ``torch.multinomial(probs, 1)`` would draw, by position.

    ``multinomial(p, 1)`` is ``argmax(p / Exp(1) noise)``. ``generate`` draws for the whole batch once per position, so
    drawing [batch, vocab] position after position from the global generator gives every row its own
    noise and leaves the generator where ``generate`` leaves it, however far ahead single rows are.
    """

    def __init__(self, batch: int, vocab: int, device: torch.device):
        self.shape, self.device = (batch, vocab), device
        self.num_drawn = 0
        self._global = _default_generator(device)
        self._states: dict[int, torch.Tensor] = {}  # of the generator, before each position was drawn
        self._kept: dict[int, torch.Tensor] = {}  # [batch, vocab] f32 each, oldest draw first

    def at(self, position: int, row: int) -> torch.Tensor:
        """Noise for a row's token at a position (0: its first new token).  -> [vocab] f32"""
        while self.num_drawn <= position:
            self._states[self.num_drawn] = self._global.get_state()
            self._keep(self.num_drawn, self._global)
            self.num_drawn += 1
        if position not in self._kept:
            self._keep(position, torch.Generator(self.device).set_state(self._states[position]))
        return self._kept[position][row]

    def _keep(self, position: int, generator: torch.Generator) -> None:
        noise = torch.empty(self.shape, dtype=torch.float32, device=self.device)
        self._kept[position] = noise.exponential_(1, generator=generator)
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]

    def forget_before(self, position: int) -> None:
        """No row will ask for an earlier position again."""
        for store in (self._states, self._kept):
            for passed in [at for at in store if at < position]:
                del store[passed]


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


class StockSampler:
    """Greedy choice or sampling after the call's own logits processors, as stock ``generate`` does it."""

    def __init__(
        self,
        processors: Sequence[Sequence[Processor]],
        do_sample: bool,
        paddings: Sequence[Sequence[int]],
        device: torch.device,
    ):
        """Per row of the batch: its processors, and the left padding they expect to see before its prompt."""
        self.kind: Literal["greedy", "sampled"] = "sampled" if do_sample else "greedy"
        self.processors, self.do_sample, self.paddings, self.device = processors, do_sample, paddings, device
        self._noise: GeneratorNoise | None = None

    def choosers(self, requests: Sequence[Request], logits: torch.Tensor, num_nodes: Sequence[int]) -> list[Chooser]:
        if not any(self.processors) and not self.do_sample:
            best = logits.float().argmax(-1).cpu().split(list(num_nodes))
            return [choices.tolist().__getitem__ for choices in best]
        if self.do_sample:
            self._noise = self._noise or GeneratorNoise(len(self.paddings), logits.shape[-1], self.device)
            self._noise.forget_before(min(request.num_emitted for request in requests))
        return [
            functools.partial(self._choose, request, rows)
            for request, rows in zip(requests, logits.split(list(num_nodes)), strict=True)
        ]

    def _choose(self, request: Request, logits: torch.Tensor, node: int) -> int:
        """The token after ``node``, whose path from the root has just been committed to ``request.tokens``."""
        scores = logits[node : node + 1].to(device=self.device, dtype=torch.float32, copy=True)  # [1, vocab]
        if processors := self.processors[request.index]:
            input_ids = torch.tensor([[*self.paddings[request.index], *request.tokens]], device=self.device)
            for processor in processors:
                scores = processor(input_ids, scores)
        if self._noise is None:
            return int(scores.argmax(-1))
        probs = scores.softmax(-1)
        if not bool(torch.isfinite(probs).all()):
            raise RuntimeError(
                "sampling met probabilities that are inf or nan; check the model's logits and processors"
            )
        return int((probs[0] / self._noise.at(request.num_emitted, request.index)).argmax())
