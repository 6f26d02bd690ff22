"""Reuse of K/V between requests that begin with the same tokens (prefix caching)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hf_slospec.families.states import RecurrentStates
from hf_slospec.model.batch import CachedSequence, NewTokens
from hf_slospec.model.inputs import DraftLevel, Outputs
from hf_slospec.model.memory import as_memory_error
from hf_slospec.model.sequence_room import KeptPrefix, RequestTokens, SequenceRoom, num_common
from hf_slospec.model.tree_mask import chain, chain_and_tree
from hf_slospec.tree.tree import TokenTree

NEVER = -1  # equals no version of a model
MIN_SHARED = 16  # tokens; computing the K/V of fewer is faster than keeping or copying it


class PrefixReuse(SequenceRoom):
    """Prefix cache: keeps the K/V of finished requests while there is room, for requests with the
    same first tokens.

    A request takes a kept sequence over if it uses nearly all of it, and copies it otherwise.
    """

    def release(self, request: RequestTokens, may_keep: bool = True) -> None:
        """Keep the K/V of a finished request, if it has any that may be kept, or drop it."""
        has_embeds = self._embeds.pop(request, None) is not None
        state = self._states.pop(request, None)
        sequence = self._by_request.pop(request, None)
        if sequence is None:
            return
        may_keep = may_keep and bool(self.max_kept) and not has_embeds and request.error is None
        if may_keep and self._is_shareable(sequence, state):
            try:
                with as_memory_error():
                    self._keep(
                        KeptPrefix(
                            request.params.cache_salt, request.tokens[: sequence.length], sequence
                        )
                    )
            except (
                MemoryError
            ):  # no memory to update its states; without its K/V, later requests only take longer
                self.cache.release(sequence)
        else:
            self.cache.release(sequence)

    def withhold(self, request: RequestTokens) -> None:
        """Keep the K/V of a request from being reused, as it does not depend on the request's
        tokens alone.
        """
        self._states[request] = NEVER

    def close(self) -> None:
        """Release all requests and the cache; the last user frees its memory, or keeps it for its
        CUDA graphs.
        """
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
        """Give a request the K/V of the sequence that shares the most leading tokens, if that is
        more than it has.

        Returns:
            The number of the request's tokens whose K/V is cached now; never all, as the last one's
            logits are needed.
        """
        source, length = self._longest_match(request)
        if length < self.num_cached(request) + MIN_SHARED:
            return self.num_cached(request)
        if isinstance(source, KeptPrefix):
            self._kept.touch(source)  # so that it is evicted last to make room for the request
            is_new = request not in self._by_request
            left_out = len(source.tokens) - length
            if is_new and (left_out < MIN_SHARED or not self._is_room_beside(source, request)):
                self._take_over(source, request, length)
            else:
                self._copy(source.sequence, request, length)
        elif source is not None:
            self._copy(source, request, length)
        return self.num_cached(request)

    def _longest_match(
        self, request: RequestTokens
    ) -> tuple[KeptPrefix | CachedSequence | None, int]:
        """Return the kept or running sequence that shares the most leading tokens with a request,
        and how many.
        """
        params = request.params
        if self.max_kept is None or not self._is_plain(len(params.prompt) + params.num_padding):
            return None, 0
        self.packed.version.notice(structure=False)
        if self._kept_state != self.weights_state:
            self._keep_at_most(0)
        wanted = request.tokens[:-1][: self.packed.rope.max_plain]
        matches = list[tuple[KeptPrefix | CachedSequence, int]]()
        kept, length = self._kept.longest(wanted, params.cache_salt)
        if kept is not None and (length == len(kept.tokens) or not self.packed.has_states):
            matches.append((kept, length))
        for other, sequence in self._by_request.items():
            is_open = (
                self._is_shareable(sequence, self._states[other]) and other not in self._embeds
            )
            if is_open and other is not request and other.params.cache_salt == params.cache_salt:
                length = min(num_common(other.tokens, wanted), sequence.length)
                if (
                    length == sequence.length or not self.packed.has_states
                ):  # a state cannot be cut to fewer tokens
                    matches.append((sequence, length))
        return max(matches, key=lambda pair: pair[1], default=(None, 0))

    def _is_shareable(self, sequence: CachedSequence, state: int | None) -> bool:
        is_known = sequence.length >= MIN_SHARED and state == self.weights_state
        return (
            self.max_kept is not None
            and is_known
            and self._is_plain(sequence.prompt_len + sequence.num_padding)
        )

    def _is_plain(self, length: int) -> bool:
        """Return whether a prompt of this length gets the same RoPE as other prompts; long ones may
        be scaled.
        """
        return self.packed.rope.max_plain is None or length <= self.packed.rope.max_plain

    def _is_room_beside(self, kept: KeptPrefix, request: RequestTokens) -> bool:
        """Return whether there are slots for a request besides those of a kept prefix."""
        if self.max_slots is None:
            return True
        return self.num_held + len(kept.tokens) + self._roomy_capacity(request) <= self.max_slots

    def _take_over(self, kept: KeptPrefix, request: RequestTokens, length: int) -> None:
        self._kept.remove(kept)
        kept.sequence.length = length
        kept.sequence.capacity = min(
            kept.sequence.capacity, max(length, self._capacity(request, 0))
        )
        kept.sequence.prompt_len, kept.sequence.num_padding = (
            len(request.params.prompt),
            request.params.num_padding,
        )
        self._by_request[request], self._states[request] = kept.sequence, self._kept_state

    def _copy(self, source: CachedSequence, request: RequestTokens, length: int) -> None:
        """Copy the K/V of the first ``length`` tokens, unless there is no room for both sequences."""
        with (
            contextlib.suppress(MemoryError),
            as_memory_error(),
        ):  # the step that needs the room raises it again
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


class RequestSequences(PrefixReuse):
    """K/V of one engine's requests in a model's cache: their slots, prefix reuse and forwards."""

    def forward(
        self,
        parts: Sequence[NewTokens],
        logit_rows: torch.Tensor,
        feature_layers: tuple[int, ...] = (),
    ) -> Outputs:
        """Forward new tokens of requests; see :meth:`PackedModel.outputs`."""
        if self.max_kept is not None:
            self.packed.version.notice()
        for part in parts:
            part.sequence.staged_end = part.sequence.length + part.num_tokens
        return self.packed.outputs(self.cache.pool, parts, logit_rows, feature_layers)

    def draft(self, parts: Sequence[NewTokens], logit_rows: torch.Tensor, level: DraftLevel) -> Any:
        """Forward a level of draft nodes of requests; see :meth:`PackedModel.draft`."""
        if self.max_kept is not None:
            self.packed.version.notice(structure=False)
        return self.packed.draft(self.cache.pool, parts, logit_rows, level)

    def uncached(self, request: RequestTokens) -> list[int]:
        """Return the request's committed tokens without K/V."""
        return request.tokens[self.num_cached(request) :]

    def prefill(self, request: RequestTokens, num_tokens: int) -> None:
        """Compute the K/V of the request's next ``num_tokens`` tokens."""
        part = self.chain(request, self.uncached(request)[:num_tokens])
        self.forward([part], torch.empty(0, dtype=torch.int64, device="cpu"))
        self.of(request).length += num_tokens

    def chain(self, request: RequestTokens, tokens: Sequence[int]) -> NewTokens:
        """Return the new tokens of a forward: ``tokens`` behind the cached ones, with a causal
        mask.
        """
        return chain(self.packed, self.of(request), tokens, self._embeds.get(request))

    def chain_and_tree(
        self, request: RequestTokens, tokens: Sequence[int], tree: TokenTree
    ) -> NewTokens:
        """Return the new tokens of a forward: ``tokens`` up to the root, then the tree's other
        nodes.
        """
        return chain_and_tree(
            self.packed, self.of(request), tokens, tree, self._embeds.get(request)
        )

    def give_embeds(self, request: RequestTokens, embeds: torch.Tensor) -> None:
        """Set embeddings that replace those of the prompt's tokens.  [prompt_len, hidden]"""
        self._embeds[request] = embeds

    def load(
        self,
        request: RequestTokens,
        layers: Iterable[Sequence[torch.Tensor]],
        length: int,
        position_offset: int = 0,
        states: RecurrentStates | None = None,
    ) -> None:
        """Copy in the K/V of the request's first ``length`` tokens; see :meth:`KVCache.load`.

        ``position_offset``: positions of later tokens minus their indices.
        """
        sequence = self.of(request)
        self.cache.load(sequence, layers, length, states)
        sequence.position_offset = position_offset

    def replace(self, request: RequestTokens, layers: Sequence[Sequence[torch.Tensor]]) -> None:
        """Replace each layer's K, V and index keys [num_heads, 1, dim] of the token behind the
        cached ones.
        """
        sequence = self.of(request)
        self.cache.write(sequence, layers, sequence.length + 1)

    def last_slots(self, request: RequestTokens, number: int) -> torch.Tensor:
        """Return the slots of the last cached tokens of a request.  -> [number] int64, on the host"""
        sequence = self.of(request)
        assert number <= sequence.length, "slots before a sequence are another's"
        end = sequence.start + sequence.length
        return torch.arange(end - number, end, device="cpu")

    def states(self, request: RequestTokens) -> RecurrentStates | None:
        """Return the states after the request's cached tokens; None if the model has none."""
        sequence = self.of(request)
        if sequence.states is not None:
            sequence.states.take_in(sequence.length)
        return sequence.states
