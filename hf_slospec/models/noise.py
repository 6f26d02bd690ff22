"""Noise of sampled tokens, drawn as ``torch.multinomial`` draws it, and known ahead of time."""

from __future__ import annotations

import torch

MAX_NOISE_BYTES = 2**28  # of noise at hand; what is older is drawn again from the generator's saved state


class GeneratorNoise:
    """Noise that ``torch.multinomial(probs, 1)`` would draw, by position and row.

    ``multinomial(p, 1)`` is ``argmax(p / Exp(1) noise)``. ``generate`` draws for the whole batch once per position, so
    drawing [batch, vocab] position after position from the global generator gives every row the same noise as there and
    leaves the generator in the same state, however far ahead single rows are. With a seed, an own generator draws the
    noise that the global one would draw after ``torch.manual_seed(seed)``.
    """

    def __init__(self, batch: int, probs: torch.Tensor, seed: int | None = None, sharing: int = 1):
        """Begin with the generator's present state, or with a seed.

        Args:
            probs: [..., vocab]; gives the dtype, device and vocabulary size of the noise.
            sharing: number of such objects that share :data:`MAX_NOISE_BYTES`.
        """
        self.shape, self.dtype, self.device = (batch, probs.shape[-1]), probs.dtype, probs.device
        self.max_positions = max(1, MAX_NOISE_BYTES // sharing // (batch * probs.shape[-1] * probs.element_size()))
        self.num_drawn = 0
        self._has_own_generator = seed is not None
        own = None if seed is None else torch.Generator(probs.device).manual_seed(seed)
        self._generator = own or _default_generator(probs.device)
        # State of the generator before each position's draw (5 kB on a CPU), one more than is drawn or foreseen.
        self._states = {0: self._generator.get_state()}
        self._cached: dict[int, torch.Tensor] = {}  # [batch, vocab] f32 each, oldest draw first

    def at(self, position: int, row: int) -> torch.Tensor:
        """Return the noise for a row's token at a position (0: its first new token).  -> [vocab] f32"""
        while self.num_drawn <= position:
            state = self._generator.get_state()
            if not torch.equal(
                state, self._states[self.num_drawn]
            ):  # others drew from the generator since the last draw
                self._forget_foreseen(state)
            self._noise(self.num_drawn)
            self.num_drawn += 1
            self._generator.set_state(self._states[self.num_drawn])
        return self._noise(position)[row]

    def foreseen(self, position: int, row: int) -> torch.Tensor:
        """Return the noise of ``at``, unless others draw before; the generator keeps its state.  -> [vocab] f32"""
        for earlier in range(max(self._states), position):
            self._noise(earlier)
        return self._noise(position)[row]

    def _noise(self, position: int) -> torch.Tensor:
        """Return the noise of a position whose state is known.  -> [batch, vocab] f32"""
        if position not in self._cached:
            generator = torch.Generator(self.device).set_state(self._states[position])
            noise = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self._cached[position] = noise.exponential_(1, generator=generator)
            self._states.setdefault(position + 1, generator.get_state())
            if len(self._cached) > self.max_positions:
                del self._cached[next(iter(self._cached))]
            return noise
        return self._cached[position]

    def _forget_foreseen(self, state: torch.Tensor) -> None:
        """Drop what was foreseen of positions that are not drawn yet; the next one begins with this state."""
        for kept in (self._cached, self._states):
            for later in [position for position in kept if position >= self.num_drawn]:
                del kept[later]
        self._states[self.num_drawn] = state

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
