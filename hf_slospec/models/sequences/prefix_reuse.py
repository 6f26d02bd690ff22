"""Reuse of K/V between requests that begin with the same tokens (prefix caching)."""

from __future__ import annotations

import contextlib

from hf_slospec.models.batch.cached_sequence import CachedSequence
from hf_slospec.models.device.memory import as_memory_error
from hf_slospec.models.sequences.kept_prefixes import KeptPrefix, num_common
from hf_slospec.models.sequences.room import RequestTokens, SequenceRoom

NEVER = -1  # equals no state of a model's fingerprint
MIN_SHARED = 16  # tokens; computing the K/V of fewer is faster than keeping or copying it


class PrefixReuse(SequenceRoom):
    """Prefix cache: keeps the K/V of finished requests while there is room, for requests with the same first tokens.

    A request takes a kept sequence over if it uses nearly all of it, and copies it otherwise.
    """

    def release(self, request: RequestTokens, may_keep: bool = True) -> None:
        """Keep the K/V of a finished request, if it has any that may be kept, or drop it."""
        has_embeds = self._embeds.pop(request, None) is not None
        state, sequence = self._states.pop(request, None), self._by_request.pop(request, None)
        if sequence is None:
            return
        may_keep = may_keep and bool(self.max_kept) and not has_embeds and request.error is None
        if may_keep and self._is_shareable(sequence, state):
            try:
                with as_memory_error():
                    self._keep(KeptPrefix(request.params.cache_salt, request.tokens[: sequence.length], sequence))
            except MemoryError:  # no memory to update its states; without its K/V, later requests only take longer
                self.cache.release(sequence)
        else:
            self.cache.release(sequence)

    def withhold(self, request: RequestTokens) -> None:
        """Keep the K/V of a request from being reused, as it does not depend on the request's tokens alone."""
        self._states[request] = NEVER

    def close(self) -> None:
        """Release all requests and the cache; the last user frees its memory, or keeps it for its CUDA graphs."""
        for request in list(self._by_request):
            self.release(request, may_keep=False)
        self._keep_at_most(0)
        if self._cache is not None:
            self.packed.keep_if_captured(self._cache)
            self._cache = None

    def num_reusable(self, request: RequestTokens) -> int:
        """Return how many tokens :meth:`reuse` would find now; 0 for a request that has K/V."""
        length = 0 if request in self._by_request else self._longest_match(request)[1]
        return length if length >= MIN_SHARED else 0

    def reuse(self, request: RequestTokens) -> int:
        """Give a request the K/V of the sequence that shares the most leading tokens, if that is more than it has.

        Returns:
            The number of the request's tokens whose K/V is cached now; never all, as the last one's logits are needed.
        """
        source, length = self._longest_match(request)
        if length < self.num_cached(request) + MIN_SHARED:
            return self.num_cached(request)
        if isinstance(source, KeptPrefix):
            self._kept.touch(source)  # so that it is evicted last to make room for the request
            is_new, left_out = request not in self._by_request, len(source.tokens) - length
            if is_new and (left_out < MIN_SHARED or not self._is_room_beside(source, request)):
                self._take_over(source, request, length)
            else:
                self._copy(source.sequence, request, length)
        elif source is not None:
            self._copy(source, request, length)
        return self.num_cached(request)

    def _longest_match(self, request: RequestTokens) -> tuple[KeptPrefix | CachedSequence | None, int]:
        """Return the kept or running sequence that shares the most leading tokens with a request, and how many."""
        params = request.params
        if self.max_kept is None or not self._is_plain(len(params.prompt) + params.num_padding):
            return None, 0
        self.packed.fingerprint.notice(structure=False)
        if self._kept_state != self.weights_state:
            self._keep_at_most(0)
        wanted = request.tokens[:-1][: self.packed.rope.max_plain]
        matches = list[tuple[KeptPrefix | CachedSequence, int]]()
        kept, length = self._kept.longest(wanted, params.cache_salt)
        if kept is not None and (length == len(kept.tokens) or not self.packed.has_states):
            matches.append((kept, length))
        for other, sequence in self._by_request.items():
            is_open = self._is_shareable(sequence, self._states[other]) and other not in self._embeds
            if is_open and other is not request and other.params.cache_salt == params.cache_salt:
                length = min(num_common(other.tokens, wanted), sequence.length)
                if length == sequence.length or not self.packed.has_states:  # a state cannot be cut to fewer tokens
                    matches.append((sequence, length))
        return max(matches, key=lambda pair: pair[1], default=(None, 0))

    def _is_shareable(self, sequence: CachedSequence, state: int | None) -> bool:
        is_known = sequence.length >= MIN_SHARED and state == self.weights_state
        return self.max_kept is not None and is_known and self._is_plain(sequence.prompt_len + sequence.num_padding)

    def _is_plain(self, length: int) -> bool:
        """Return whether a prompt of this length gets the same RoPE as other prompts; long ones may be scaled."""
        return self.packed.rope.max_plain is None or length <= self.packed.rope.max_plain

    def _is_room_beside(self, kept: KeptPrefix, request: RequestTokens) -> bool:
        """Return whether there are slots for a request besides those of a kept prefix."""
        if self.max_slots is None:
            return True
        return self.num_held + len(kept.tokens) + self._roomy_capacity(request) <= self.max_slots

    def _take_over(self, kept: KeptPrefix, request: RequestTokens, length: int) -> None:
        self._kept.remove(kept)
        kept.sequence.length = length
        kept.sequence.capacity = min(kept.sequence.capacity, max(length, self._capacity(request, 0)))
        kept.sequence.prompt_len, kept.sequence.num_padding = len(request.params.prompt), request.params.num_padding
        self._by_request[request], self._states[request] = kept.sequence, self._kept_state

    def _copy(self, source: CachedSequence, request: RequestTokens, length: int) -> None:
        """Copy the K/V of the first ``length`` tokens, unless there is no room for both sequences."""
        with contextlib.suppress(MemoryError), as_memory_error():  # the step that needs the room raises it again
            self.reserve([request])
            if source.length >= length:  # it was not evicted to make room
                self.cache.pool.copy(source, self.of(request), length)

    def _keep(self, prefix: KeptPrefix) -> None:
        if self._kept_state != self.weights_state:
            self._keep_at_most(0)
            self._kept_state = self.weights_state
        prefix.sequence.capacity = prefix.sequence.length
        if prefix.sequence.states is not None:  # free what is staged
            prefix.sequence.states.take_in(prefix.sequence.length)
        for unneeded in self._kept.add(prefix):
            self.cache.release(unneeded.sequence)
        self._keep_at_most(self.max_kept or 0)
