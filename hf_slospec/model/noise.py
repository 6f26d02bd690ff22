"""Random noise that decides sampled tokens: equal to what ``torch.multinomial`` draws, and
available before the tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

# Bytes of cached noise. Noise beyond this is drawn again from the generator's saved state.
MAX_NOISE_BYTES = 2**28


class NoiseOperators(Protocol):
    """Computations with noise in fp32 on CPUs."""

    def exponential_(self, noise: torch.Tensor, generator: torch.Generator) -> None:
        """Fill a contiguous tensor with Exp(1) noise, and advance the generator."""

    def choose(self, probs: torch.Tensor, noise: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the token with the highest ratio of probability to noise in each row; -1 for rows
        with probabilities that are not finite.  -> [num_rows] int64

        Args:
            probs: [num_rows, vocab].
            noise: [vocab] of each row.
        """


class TorchOperators(NoiseOperators):
    """The computations of ``torch.multinomial``."""

    def exponential_(self, noise: torch.Tensor, generator: torch.Generator) -> None:
        noise.exponential_(1, generator=generator)

    def choose(self, probs: torch.Tensor, noise: Sequence[torch.Tensor]) -> torch.Tensor:
        tokens = (probs / torch.stack(list(noise))).argmax(-1)
        return torch.where(torch.isfinite(probs).all(-1), tokens, -1)


BY_TORCH = TorchOperators()
_on_cpus: NoiseOperators = BY_TORCH


def operators_for(tensor: torch.Tensor) -> NoiseOperators:
    """Return the operators for noise or probabilities of a tensor's device and dtype."""
    return _on_cpus if tensor.is_cpu and tensor.dtype == torch.float32 else BY_TORCH


def use_operators(operators: NoiseOperators) -> None:
    """Replace the operators on CPUs, where torch draws one number after the other, if these pass a
    trial: all results must have the same bits, and the generator the same state.
    """
    global _on_cpus
    if operators is not _on_cpus and _passes_trial(operators):
        _on_cpus = operators


def _passes_trial(operators: NoiseOperators) -> bool:
    results = []
    for each in BY_TORCH, operators:
        generator = torch.Generator("cpu").manual_seed(1)
        noise = torch.empty(3, 1100, dtype=torch.float32, device="cpu")
        for rows in noise, noise[1:], noise[:, :313].clone():
            each.exponential_(rows, generator)
        probs = torch.empty_like(noise).exponential_(1, generator=generator).softmax(-1)
        probs[1, 7] = torch.nan
        results.append((noise, generator.get_state(), each.choose(probs, noise.unbind())))
    return all(map(torch.equal, *results))


class GeneratorNoise:
    """Noise that ``torch.multinomial(probs, 1)`` would draw, by position and row.

    ``multinomial(p, 1)`` is ``argmax(p / Exp(1) noise)``. ``generate`` draws for the whole batch
    once per position. Drawing [batch, vocab] for one position after the other from the global
    generator therefore gives every row the noise of ``generate`` and leaves the generator in the
    same state, even if some rows are ahead of others. With a seed, a separate generator draws the
    noise that the global one would draw after ``torch.manual_seed(seed)``.
    """

    def __init__(self, batch: int, probs: torch.Tensor, seed: int | None = None, sharing: int = 1):
        """Begin with the generator's present state, or with a seed.

        Args:
            batch: rows of the batch.
            probs: [..., vocab]; gives the dtype, device and vocabulary size of the noise.
            sharing: number of these objects that share :data:`MAX_NOISE_BYTES`.
        """
        self.shape = (batch, probs.shape[-1])
        self.dtype = probs.dtype
        self.device = probs.device
        self.max_positions = max(
            1, MAX_NOISE_BYTES // sharing // (batch * probs.shape[-1] * probs.element_size())
        )
        self.num_drawn = 0
        self._has_own_generator = seed is not None
        seeded = None if seed is None else torch.Generator(probs.device).manual_seed(seed)
        self._generator = seeded or default_generator(probs.device)
        # Position -> the generator's state before that position is drawn (5 kB on a CPU).
        self._states = {0: self._generator.get_state()}
        # Position -> noise [batch, vocab] f32, oldest draw first.
        self._cached: dict[int, torch.Tensor] = {}

    def rows(self, wanted: Sequence[tuple[int, int]], is_drawn: bool = True) -> list[torch.Tensor]:
        """Return the noise that decides tokens, which must not be changed.

        Args:
            wanted: position (0: the first new token) and row of each token.
            is_drawn: advance the generator past these positions, as ``generate`` does. If False,
                the generator keeps its state, and a later draw gives the same noise unless other
                code draws from the generator in between.

        Returns:
            [vocab] f32 for each of ``wanted``.
        """
        by_position: dict[int, list[int]] = {}
        for index, (position, _) in enumerate(wanted):
            by_position.setdefault(position, []).append(index)
        fits = len(by_position) <= self.max_positions
        rows = dict[int, torch.Tensor]()
        for position in sorted(by_position):  # sorted, so that each position is drawn at most once
            noise = self._drawn(position) if is_drawn else self._foreseen(position)
            for index in by_position[position]:
                row = noise[wanted[index][1]]
                # A view would keep the noise of all rows in memory.
                rows[index] = row if fits else row.clone()
        return [rows[index] for index in range(len(wanted))]

    def _drawn(self, position: int) -> torch.Tensor:
        """Return the noise of a position, and advance the generator past it.  -> [batch, vocab] f32"""
        while self.num_drawn <= position:
            state = self._generator.get_state()
            # Other code has drawn from the generator since the last draw.
            if not torch.equal(state, self._states[self.num_drawn]):
                self._forget_foreseen(state)
            self._noise(self.num_drawn)
            self.num_drawn += 1
            self._generator.set_state(self._states[self.num_drawn])
        return self._noise(position)

    def _foreseen(self, position: int) -> torch.Tensor:
        """Return the noise of a position without advancing the generator.  -> [batch, vocab] f32"""
        for earlier in range(max(self._states), position):
            self._noise(earlier)
        return self._noise(position)

    def _noise(self, position: int) -> torch.Tensor:
        """Return the noise of a position before which the generator's state is known.  -> [batch,
        vocab] f32
        """
        if position not in self._cached:
            generator = torch.Generator(self.device).set_state(self._states[position])
            noise = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            operators_for(noise).exponential_(noise, generator)
            self._cached[position] = noise
            self._states.setdefault(position + 1, generator.get_state())
            if len(self._cached) > self.max_positions:
                del self._cached[next(iter(self._cached))]
            return noise
        return self._cached[position]

    def _forget_foreseen(self, state: torch.Tensor) -> None:
        """Drop the noise of positions that the generator has not been advanced past.

        Args:
            state: the generator's present state, from which the next position is drawn.
        """
        for by_position in (self._cached, self._states):
            for later in [position for position in by_position if position >= self.num_drawn]:
                del by_position[later]
        self._states[self.num_drawn] = state

    def forget_before(self, position: int) -> None:
        """Drop the noise of positions before ``position``, which no row needs again."""
        # With several rows, end() needs earlier states: a row may be drawn past the position at
        # which the whole batch ends.
        needs_no_states = self._has_own_generator or self.shape[0] == 1
        for by_position in (self._cached, self._states) if needs_no_states else (self._cached,):
            for earlier in [known for known in by_position if known < position]:
                del by_position[earlier]

    def end(self, num_positions: int) -> None:
        """Set the generator to its state after ``num_positions`` draws, as ``generate``
        leaves it.
        """
        if num_positions < self.num_drawn:
            self._generator.set_state(self._states[num_positions])


def default_generator(device: torch.device) -> torch.Generator:
    """Return the global generator of a device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[
            torch.cuda.current_device() if device.index is None else device.index
        ]
    return torch.default_generator
