"""Streamers that record what they are given."""

from __future__ import annotations

from transformers.generation import BaseStreamer


class Recorder(BaseStreamer):
    """Records everything that a streamer is given; its end as an empty list."""

    def __init__(self):
        self.puts = []

    def put(self, value):
        self.puts.append(value.tolist())

    def end(self):
        self.puts.append([])
