"""Noise of a sampled request that tests know."""

from __future__ import annotations

import torch


class KnownNoise:
    """Noise over ten tokens, of which it makes token 4 far more likely."""

    def after(self, depth):
        noise = torch.ones(10)
        noise[4] = 0.01
        return noise
