"""Text of a stream: whole characters, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from hf_slospec.serving.handle import TextStream, ToText


class StoppedText:
    """Text of a growing list of tokens, decoded step by step and cut at the first stop string."""

    def __init__(self, to_text: ToText, stop_strings: Sequence[str], keeps_stop: bool):
        """``keeps_stop``: the stop string is part of the text."""
        self._stream, self._stop_strings, self._keeps_stop = TextStream(to_text), stop_strings, keeps_stop
        self._held = ""  # text that may be the beginning of a stop string
        self.stop_string: str | None = None  # the one at which the text was cut

    def push(self, tokens: list[int], is_last: bool) -> str:
        """Add tokens and return the text that is certain to be part of the output."""
        if self.stop_string is not None:
            return ""
        text = self._held + self._stream.push(tokens, is_last)
        matches = [(text.find(stop), stop) for stop in self._stop_strings if stop in text]
        if matches:
            # The stop string that is complete first.
            begin, stop = min(matches, key=lambda match: (match[0] + len(match[1]), match[0]))
            self.stop_string, self._held = stop, ""
            return text[: begin + len(stop)] if self._keeps_stop else text[:begin]
        held = 0 if is_last else max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the text that is a prefix of the stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
