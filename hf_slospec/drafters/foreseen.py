"""Acceptance probabilities of proposals without a model, given the noise of sampled requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import exp, inf

import torch

from hf_slospec.engine.request import Request
from hf_slospec.models.device.transfer import to_device


class ForeseenNoise:
    """Noise of one request's proposed tokens, if it is known."""

    def __init__(self, request: Request, proposed: Sequence[Collection[int]]):
        """Read the noise of the tokens ``proposed[depth - 1]`` at every depth, with one copy from the device."""
        self._is_known = request.noise is not None
        self._noise = _noise_of(request, proposed)

    def given(self, prob: float, depth: int, token: int) -> float:
        """Return the probability that the target takes a proposal, given its noise if that is known.

        ``prob`` is the probability without the noise; ``depth`` is at least 1.
        """
        if not self._is_known or prob <= 0.0:
            return prob
        return exp(-self._noise.get((depth, token), inf) * (1.0 - prob) / prob)


def _noise_of(request: Request, proposed: Sequence[Collection[int]]) -> dict[tuple[int, int], float]:
    """Return the noise of proposed tokens by depth and token; empty if it is not known."""
    if request.noise is None or not proposed:
        return {}
    noise = torch.stack([request.noise.after(depth) for depth in range(len(proposed))])  # [depth, vocab]
    size = noise.shape[1]  # some models have embeddings of more tokens than they have logits of
    known = [(depth, token) for depth, tokens in enumerate(proposed) for token in sorted(tokens) if token < size]
    index = to_device(
        torch.tensor([depth * size + token for depth, token in known], dtype=torch.int64, device="cpu"), noise.device
    )
    return {(depth + 1, token): q for (depth, token), q in zip(known, noise.flatten()[index].tolist(), strict=True)}
