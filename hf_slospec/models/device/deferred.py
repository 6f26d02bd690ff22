"""Flags computed on a device that the host reads later, so that it need not wait for them."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch


class DeferredFlags:
    """Queue of boolean results: read at once on a CPU, otherwise one call later, when the device has computed them."""

    def __init__(self, device: torch.device):
        self.lag = 0 if device.type == "cpu" else 1  # calls of next()
        self._on_cuda = device.type == "cuda"
        self._pending: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def next(self, flags: torch.Tensor) -> np.ndarray | None:
        """Enqueue ``flags`` (bool, any shape) and return those that are due, or None if none are."""
        host = torch.empty(flags.shape, dtype=torch.bool, pin_memory=self._on_cuda, device="cpu")
        host.copy_(flags, non_blocking=self._on_cuda)
        arrival = None
        if self._on_cuda:
            arrival = torch.cuda.Event()
            arrival.record(torch.cuda.current_stream(flags.device))
        self._pending.append((host, arrival))
        if len(self._pending) <= self.lag:
            return None
        host, arrival = self._pending.popleft()
        if arrival is not None:
            arrival.synchronize()
        return host.numpy()
