"""Reuse of K/V between requests whose texts begin alike (prefix caching)."""

from __future__ import annotations

import contextlib

from hf_slospec.models.batch.cached_sequence import CachedSequence
from hf_slospec.models.device.memory import as_memory_error
from hf_slospec.models.sequences.kept_texts import KeptText, num_common
from hf_slospec.models.sequences.room import RequestText, SequenceRoom

NEVER = -1  # no state of a model's fingerprint
MIN_SHARED = 16  # tokens whose K/V is computed faster than it is worth keeping or copying


class PrefixReuse(SequenceRoom):
    """Keeps the K/V of requests that are over where there is room, and gives it to requests whose texts begin alike.

    The sequence of a kept text is taken over if little of the text is left out, and otherwise copied.
    """

    def release(self, request: RequestText, may_keep: bool = True) -> None:
        """Drop the K/V of a request, if it has any, or keep it for requests that begin alike."""
        has_embeds = self._embeds.pop(request, None) is not None
        state, sequence = self._states.pop(request, None), self._by_request.pop(request, None)
        if sequence is None:
            return
        if may_keep and self._is_shareable(sequence, state) and not has_embeds and request.error is None:
            try:
                with as_memory_error():
                    self._keep(KeptText(request.cache_salt, request.tokens[: sequence.length], sequence))
            except MemoryError:  # for its states; they only save time
                self.cache.release(sequence)
        else:
            self.cache.release(sequence)

    def withhold(self, request: RequestText) -> None:
        """Keep the K/V of a request out of what is kept and shared, as it is not that of all its tokens."""
        self._states[request] = NEVER

    def close(self) -> None:
        """Release all requests and the cache: after its last user, its memory is freed or kept for its CUDA graphs."""
        for request in list(self._by_request):
            self.release(request, may_keep=False)
        self._keep_at_most(0)
        if self._cache is not None:
            self.packed.keep_if_captured(self._cache)
            self._cache = None

    def num_reusable(self, request: RequestText) -> int:
        """Return how many tokens :meth:`reuse` would find now for a request without K/V; 0 for one that has some."""
        length = 0 if request in self._by_request else self._beginning_alike(request)[1]
        return length if length >= MIN_SHARED else 0

    def reuse(self, request: RequestText) -> int:
        """Give a request the K/V of the text which begins alike for longest, if it has less itself.

        Returns:
            The request's tokens whose K/V is cached now; never all, as the last one's logits are wanted.
        """
        source, length = self._beginning_alike(request)
        if length < self.num_cached(request) + MIN_SHARED:
            return self.num_cached(request)
        if isinstance(source, KeptText):
            self._kept.touch(source)  # so that it is the last to make room for the request
            is_new, left_out = request not in self._by_request, len(source.tokens) - length
            if is_new and (left_out < MIN_SHARED or not self._is_room_beside(source, request)):
                self._take_over(source, request, length)
            else:
                self._copy(source.sequence, request, length)
        elif source is not None:
            self._copy(source, request, length)
        return self.num_cached(request)

    def _beginning_alike(self, request: RequestText) -> tuple[KeptText | CachedSequence | None, int]:
        """Return the text, kept or of another request, that begins like this one for longest, and for how long."""
        if not self.max_kept or not self._is_plain(request.prompt_len + request.num_padding):
            return None, 0
        self.packed.fingerprint.notice()
        if self._kept_state != self.packed.fingerprint.state:
            self._keep_at_most(0)
        wanted = request.tokens[:-1][: self.packed.rope.max_plain]
        found = list[tuple[KeptText | CachedSequence, int]]()
        kept, length = self._kept.longest(wanted, request.cache_salt)
        if kept is not None and (length == len(kept.tokens) or not self.packed.has_states):
            found.append((kept, length))
        for other, sequence in self._by_request.items():
            is_open = self._is_shareable(sequence, self._states[other]) and other not in self._embeds
            if is_open and other is not request and other.cache_salt == request.cache_salt:
                length = min(num_common(other.tokens, wanted), sequence.length)
                if length == sequence.length or not self.packed.has_states:  # a state is of its whole text only
                    found.append((sequence, length))
        return max(found, key=lambda pair: pair[1], default=(None, 0))

    def _is_shareable(self, sequence: CachedSequence, state: int | None) -> bool:
        is_known = sequence.length >= MIN_SHARED and state == self.packed.fingerprint.state
        return bool(self.max_kept) and is_known and self._is_plain(sequence.prompt_len + sequence.num_padding)

    def _is_plain(self, length: int) -> bool:
        """Return whether the K of a prompt is that of other prompts, or its RoPE depends on its length."""
        return self.packed.rope.max_plain is None or length <= self.packed.rope.max_plain

    def _is_room_beside(self, text: KeptText, request: RequestText) -> bool:
        if self.max_slots is None:
            return True
        return self.num_held + len(text.tokens) + self._roomy_capacity(request) <= self.max_slots

    def _take_over(self, text: KeptText, request: RequestText, length: int) -> None:
        self._kept.remove(text)
        text.sequence.length = length
        text.sequence.capacity = min(text.sequence.capacity, max(length, self._capacity(request, 0)))
        text.sequence.prompt_len, text.sequence.num_padding = request.prompt_len, request.num_padding
        self._by_request[request], self._states[request] = text.sequence, self._kept_state

    def _copy(self, source: CachedSequence, request: RequestText, length: int) -> None:
        """Copy the first tokens' K/V, unless there is no room for both."""
        with contextlib.suppress(MemoryError), as_memory_error():  # the step that needs the room reports it
            self.reserve([request])
            if source.length >= length:  # it was not dropped to make room
                self.cache.pool.copy(source, self.of(request), length)

    def _keep(self, text: KeptText) -> None:
        if self._kept_state != self.packed.fingerprint.state:
            self._keep_at_most(0)
            self._kept_state = self.packed.fingerprint.state
        text.sequence.capacity = text.sequence.length
        if text.sequence.states is not None:  # frees what is staged
            text.sequence.states.take_in(text.sequence.length)
        for unneeded in self._kept.add(text):
            self.cache.release(unneeded.sequence)
        self._keep_at_most(self.max_kept)
