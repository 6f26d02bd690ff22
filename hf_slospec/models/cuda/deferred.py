"""Questions to a device whose answers the host looks at later, so that it need not wait for them."""

from __future__ import annotations

from collections import deque

import torch


class DeferredFlags:
    """Answers of yes or no: on a CPU at once, else one question late, when the device has long worked them out."""

    def __init__(self, device: torch.device):
        self.lag = 0 if device.type == "cpu" else 1  # questions
        self._on_cuda = device.type == "cuda"
        self._asked: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def next(self, answer: torch.Tensor) -> bool:
        """Put one more question, whose ``answer`` is a bool tensor, and learn the answer that is due; at first, no."""
        host = torch.empty(answer.shape, dtype=torch.bool, pin_memory=self._on_cuda)
        host.copy_(answer, non_blocking=self._on_cuda)
        arrival = None
        if self._on_cuda:
            arrival = torch.cuda.Event()
            arrival.record(torch.cuda.current_stream(answer.device))
        self._asked.append((host, arrival))
        if len(self._asked) <= self.lag:
            return False
        host, arrival = self._asked.popleft()
        if arrival is not None:
            arrival.synchronize()
        return bool(host.numpy())
