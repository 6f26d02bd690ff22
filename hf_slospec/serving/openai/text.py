"""Text of a stream: whole characters, and nothing of a stop string that ends it."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.serving.handle import TextStream, ToText


class StoppedText:
    """Incremental text of growing tokens, up to the first stop string."""

    def __init__(self, to_text: ToText, stop_strings: Sequence[str], keeps_stop: bool):
        """``keeps_stop``: the stop string is part of the text."""
        self._stream, self._stop_strings, self._keeps_stop = TextStream(to_text), stop_strings, keeps_stop
        self._held = ""  # text that may be the beginning of a stop string
        self.is_stopped = False

    def push(self, tokens: list[int], is_last: bool) -> str:
        """Add tokens and return the text that is certain to be part of the output."""
        if self.is_stopped:
            return ""
        text = self._held + self._stream.push(tokens, is_last)
        found = [(text.find(stop), stop) for stop in self._stop_strings if stop in text]
        if found:
            self.is_stopped, self._held = True, ""
            at, stop = min(found, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))  # the first to be complete
            return text[: at + len(stop)] if self._keeps_stop else text[:at]
        held = 0 if is_last else max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text with which the stop string begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
