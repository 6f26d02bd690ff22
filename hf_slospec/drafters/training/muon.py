"""Muon, an optimizer for matrices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # powers 1, 3 and 5 in the iteration that makes singular values equal
NUM_ITERATIONS, EPS = 5, 1e-7


class Muon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/), as in torch 2.9, with whose checkpoints it goes on.

    ``torch.optim.Muon`` computes in bf16 on all devices, which takes many times as long as f32 on CPUs without
    instructions for it. This one does so on GPUs only.
    """

    def __init__(self, matrices: Iterable[torch.Tensor], lr: float, weight_decay: float, momentum: float):
        """Make an optimizer of parameters of two dimensions."""
        super().__init__(matrices, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change all parameters by their gradients, with Nesterov momentum."""
        assert closure is None
        for group in self.param_groups:
            lr, momentum = float(group["lr"]), group["momentum"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                average = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix.grad))
                average.lerp_(matrix.grad, 1 - momentum)
                dtype = torch.bfloat16 if matrix.is_cuda else torch.float32
                update = orthogonalized(matrix.grad.lerp(average, momentum), dtype)
                rows, columns = matrix.shape
                matrix.mul_(1 - lr * group["weight_decay"])
                matrix.add_(update, alpha=-lr * max(1.0, rows / columns) ** 0.5)


def orthogonalized(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix of this dtype with the same singular vectors, and singular values of about 1.  [rows, columns]"""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide.to(dtype)
    wide = wide / wide.norm().clamp(min=EPS)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide
