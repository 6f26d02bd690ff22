"""Streamers that record what they are given."""

from __future__ import annotations

import torch


class Recorder:
    """Streams into a list."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.puts.append([])
