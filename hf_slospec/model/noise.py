"""Random noise that decides sampled tokens: equal to what ``torch.multinomial`` draws, and
available before the tokens are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Bytes of cached noise. Noise beyond this is drawn again from the generator's saved state.
MAX_NOISE_BYTES = 2**28
# Fills a contiguous tensor with Exp(1) noise, and advances the generator
DrawNoise = Callable[[torch.Tensor, torch.Generator], object]


def _draw_by_torch(noise: torch.Tensor, generator: torch.Generator) -> None:
    noise.exponential_(1, generator=generator)


_draw_on_cpu: DrawNoise = _draw_by_torch  # in fp32


def draw_noise_by(draw: DrawNoise) -> None:
    """Draw fp32 noise on CPUs with a function, if it passes a trial: noise and the generator's
    state must have the same bits as those of ``Tensor.exponential_``, which is slow there.
    """
    global _draw_on_cpu
    if _draw_on_cpu is draw:
        return
    generators = [torch.Generator("cpu").manual_seed(1) for _ in range(2)]
    for size in (1, 1000, 313):
        expected, drawn = torch.empty(2, size, dtype=torch.float32, device="cpu")
        expected.exponential_(1, generator=generators[0])
        draw(drawn, generators[1])
        states = [generator.get_state() for generator in generators]
        if not torch.equal(expected, drawn) or not torch.equal(*states):
            return
    _draw_on_cpu = draw


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

    def rows(self, wanted: Sequence[tuple[int, int]], is_drawn: bool = True) -> torch.Tensor:
        """Return a copy of the noise that decides tokens.

        Args:
            wanted: position (0: the first new token) and row of each token.
            is_drawn: advance the generator past these positions, as ``generate`` does. If False,
                the generator keeps its state, and a later draw gives the same noise unless other
                code draws from the generator in between.

        Returns:
            [len(wanted), vocab] f32.
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
        return torch.stack([rows[index] for index in range(len(wanted))])

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
            is_fp32_on_cpu = noise.is_cpu and noise.dtype == torch.float32
            draw = _draw_on_cpu if is_fp32_on_cpu else _draw_by_torch
            draw(noise, generator)
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
