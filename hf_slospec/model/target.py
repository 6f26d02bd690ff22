"""The target model as the engine uses it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hf_slospec.engine.interfaces import Chooser, Chunk, Drafter, Target
from hf_slospec.errors import UnsupportedModelError
from hf_slospec.model.memory import as_memory_error
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.prefilled_prompts import Prefilled
from hf_slospec.model.properties import relative_error
from hf_slospec.model.sampling import PendingChoices
from hf_slospec.model.sequences import MIN_SHARED, Sequences
from hf_slospec.model.transfer import to_device
from hf_slospec.model.tree_mask import chain, chain_and_tree
from hf_slospec.model.trial import tolerance
from hf_slospec.request.params import PromptReader
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import TokenTree

# Times the trial's tolerance: the trial takes medians, and here one rerouted expert may change the
# logits.
WHOLE_TOLERANCE = 4.0

Rows = npt.NDArray[np.int64]  # [num_rows] of a packed batch
NO_ROWS: Rows = np.empty(0, np.int64)


class Sampler(Protocol):
    """Chooser of tokens that are exactly those of plain decoding."""

    def choose(
        self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree]
    ) -> PendingChoices:
        """Return the tokens that the device chooses, and a function that makes one chooser per
        request of them.

        ``logits`` [num_nodes of all trees, vocab], in the model's dtype, holds each tree's nodes in
        turn, root first."""


class PackedTarget(Target):
    """Target that verifies many requests' draft trees in one packed forward, and commits accepted
    nodes only.
    """

    def __init__(
        self,
        packed: PackedModel,
        max_nodes: int,
        sampler: Sampler,
        max_slots: int | None = None,
        max_kept: float | None = None,
        holds_finished: bool = False,
    ):
        """Make a target that has no requests yet.

        Args:
            packed: the model.
            max_nodes: maximum number of nodes of one request's draft tree, its root not counted.
            sampler: chooses tokens.
            max_slots: see :class:`Sequences`, as for ``max_kept``.
            holds_finished: K/V of finished requests stays readable in ``sequences`` until
                ``close``.
        """
        self.sampler = sampler
        self.holds_finished = holds_finished
        self.sequences = Sequences(packed, max_nodes, max_slots, max_kept)
        self._reader: Drafter | None = None  # reads features
        self._features: torch.Tensor | None = (
            None  # [num_tokens, num_features], of the verified packed batch
        )
        self._begins: dict[
            Request, int
        ] = {}  # index of a request's first token in the verified packed batch

    @property
    def num_one_off_forwards(self) -> int:
        return self.sequences.packed.num_one_off_forwards

    @property
    def path(self) -> str:
        layers = () if self._reader is None else self._reader.feature_layers
        return self.sequences.packed.status(layers).partition(":")[0]

    def inform(self, drafter: Drafter) -> None:
        """Give a drafter its ``feature_layers``' hidden states of every token that is committed
        from now on.
        """
        self._reader = drafter if drafter.feature_layers else None

    @property
    def shares_prompts(self) -> bool:
        """Return whether requests can use the K/V of others with the same prompt, at no loss to the
        drafter.

        Not with a drafter that reads features: it has none of tokens that the target does not
        process.
        """
        return self._reader is None and not self.sequences.has_embeds

    @as_memory_error()
    def verify(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], chunks: Sequence[Chunk] = ()
    ) -> Sequence[Chooser]:
        sequences = self.sequences
        packed = sequences.packed
        num_nodes = [tree.num_nodes - 1 for tree in trees] + [0] * len(chunks)
        if packed.ranks.number > 1:
            self._check_ranks(requests, trees, chunks)
        self._reserve([*requests, *(chunk.request for chunk in chunks)], num_nodes)
        whole = list(map(self._prefill_whole, requests))
        self._begins = {}
        self._features = None
        parts = []
        chosen_rows = [NO_ROWS]
        reads = list[tuple[PromptReader, Rows]]()
        begin = 0
        for request, tree, length in (
            *zip(requests, trees, itertools.repeat(None), strict=False),
            *((chunk.request, None, chunk.num_tokens) for chunk in chunks),
        ):
            tokens = sequences.uncached(request)[:length]
            sequence = sequences.of(request)
            self._begins[request] = begin
            if (reader := request.params.prompt_reader) is not None:
                first = begin - sequence.length  # row of the prompt's first token, if it had one
                end = min(sequence.length + len(tokens), request.prompt_len - 1)
                reads.append((reader, np.arange(first + reader.num_read, first + end)))
            if tree is None:
                parts.append(chain(packed, sequence, tokens))
            else:  # the last token is the root
                parts.append(chain_and_tree(packed, sequence, tokens, tree))
                chosen_rows.append(begin + len(tokens) - 1 + np.arange(tree.num_nodes))
            begin += parts[-1].num_tokens
        wanted = np.concatenate([*chosen_rows, *(rows for _, rows in reads)])
        layers = self._reader.feature_layers if self._reader is not None else ()
        try:
            outputs = sequences.forward(parts, torch.from_numpy(wanted), layers)
        except BaseException:  # nothing has changed, as the engine expects
            for request, prefilled in zip(requests, whole, strict=True):
                if prefilled is not None:
                    sequences.of(request).truncate(0)
            raise
        self._features = outputs.features
        logits, *read_logits = outputs.logits.split(
            [sum(map(len, chosen_rows)), *(len(rows) for _, rows in reads)]
        )
        # (index, logits of the packed forward, those of the model's own) after whole prompts
        expected = list[tuple[int, torch.Tensor, torch.Tensor]]()
        roots = itertools.accumulate((tree.num_nodes for tree in trees), initial=0)
        for index, (prefilled, root) in enumerate(zip(whole, roots, strict=False)):
            if prefilled is None or prefilled.logits is None:
                continue
            if prefilled.last is None:
                expected.append((index, logits[root], prefilled.logits))
            else:
                sequences.replace(requests[index], prefilled.last)
                logits[root] = prefilled.logits
        for (reader, rows), prompt_logits in zip(reads, read_logits, strict=True):
            if len(rows):
                reader.take(prompt_logits)
        choices, make_choosers = self.sampler.choose(requests, logits, trees)
        choosers = make_choosers(choices.tolist())  # the host waits for the device
        for index, packed_logits, expected_logits in expected:
            choosers[index] = self._checked(choosers[index], packed_logits, expected_logits)
        return choosers

    def _reserve(self, requests: Sequence[Request], num_nodes: Sequence[int]) -> None:
        """Reserve slots; raise MemoryError in all processes of the model if one of them has too
        few.
        """
        lacks: MemoryError | None = None
        try:
            self.sequences.reserve(requests, num_nodes)
        except MemoryError as error:
            lacks = error
        if not self.sequences.packed.ranks.least(lacks is None):
            raise lacks or MemoryError("another process of the tensor-parallel model lacks memory")

    def _check_ranks(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], chunks: Sequence[Chunk]
    ) -> None:
        """Raise InvalidInputError unless all processes of the model verify the same."""
        work = [[len(requests), len(chunks)]]
        for request, tree in zip(requests, trees, strict=True):
            work += [[request.params.max_new_tokens], self.sequences.uncached(request)]
            work += [tree.tokens.tolist(), tree.parents.tolist()]
        work += [self.sequences.uncached(chunk.request)[: chunk.num_tokens] for chunk in chunks]
        self.sequences.packed.ranks.check_equal(work)

    def _prefill_whole(self, request: Request) -> Prefilled | None:
        """Prefill a prompt that needs the model's own forward; return it if its last token comes
        next.
        """
        prefill = request.params.prefill
        if prefill is None or self.sequences.num_cached(request):
            return None
        done: Prefilled = prefill()
        self.sequences.load(request, done.layers, done.length, done.position_offset, done.states)
        self.sequences.withhold(request)  # equal tokens may stand for other images
        if len(self.sequences.uncached(request)) == 1:
            return done
        if done.last is not None:  # later tokens see it
            self.sequences.replace(request, done.last)
            self.sequences.of(request).length += 1
        return None

    def _checked(self, chooser: Chooser, logits: torch.Tensor, expected: torch.Tensor) -> Chooser:
        """Return the chooser, or one that raises if ``logits`` are not those of the model's own
        forward.

        ``logits`` and ``expected``: [vocab], after the prompt's last token.
        """
        packed = self.sequences.packed
        error = float(relative_error(logits[None].cpu(), expected[None].cpu()))
        if error <= WHOLE_TOLERANCE * tolerance(packed):
            return chooser

        def refuse(node: int) -> int:
            raise UnsupportedModelError(
                f"{type(packed.model).__name__} cannot be used with slo_tpot and this prompt: behind it, logits of a "
                f"packed forward differ from the model's own by {error:.1%}, so its layers do something with the "
                "inputs beside the text that a packed forward does not do; call generate without slo_tpot"
            )

        return refuse

    def commit(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        chunks: Sequence[Chunk] = (),
    ) -> None:
        source = list[int]()
        destination = list[int]()
        committed = list[tuple[Request, int, Sequence[int]]]()
        for request, nodes in zip(requests, accepted, strict=True):
            sequence = self.sequences.of(request)
            chain_len = len(request.tokens) - len(nodes) - 1 - sequence.length
            first_node = sequence.start + sequence.length + chain_len
            for index, node in enumerate(nodes):
                if node - 1 != index:
                    source.append(first_node + node - 1)
                    destination.append(first_node + index)
            indices = [*range(chain_len), *(chain_len - 1 + node for node in nodes)]
            committed.append((request, sequence.length, indices))
        for chunk in chunks:
            begin = self.sequences.num_cached(chunk.request)
            committed.append((chunk.request, begin, range(chunk.num_tokens)))
        with as_memory_error():
            self.sequences.cache.pool.move(
                source, destination
            )  # nothing is committed before it succeeds
        for request, _, rows in committed:
            self.sequences.of(request).commit(rows)
        with (
            contextlib.suppress(MemoryError),
            as_memory_error(),
        ):  # the drafter then lacks features of these tokens
            self._hand_over(committed)
        self._features = None

    def _hand_over(self, committed: Sequence[tuple[Request, int, Sequence[int]]]) -> None:
        """Give the drafter the features of committed tokens.

        ``committed``: request, index of its first token, and indices among the request's tokens in
        the packed batch.
        """
        if self._reader is None or self._features is None:
            return
        rows = [
            self._begins[request] + index for request, _, indices in committed for index in indices
        ]
        features = self._features.index_select(
            0, to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), self._features.device)
        )
        per_request_features = features.split([len(indices) for _, _, indices in committed])
        for (request, begin, _), part in zip(committed, per_request_features, strict=True):
            self._reader.take_features(request, begin, part)

    def reuse(self, request: Request) -> int:
        if not self._may_reuse(request):
            return self.sequences.num_cached(request)
        num_cached = self.sequences.num_cached(request)
        num_reused = self.sequences.reuse(request)
        if num_reused > num_cached and self._reader is not None:
            num_known = self._reader.reuse(request)
            if (
                0 < num_reused - num_known < MIN_SHARED
            ):  # process these few again, for the drafter's features
                self.sequences.of(request).truncate(num_known)
                return self.sequences.num_cached(request)
        return num_reused

    def num_reusable(self, request: Request) -> int:
        return self.sequences.num_reusable(request) if self._may_reuse(request) else 0

    def _may_reuse(self, request: Request) -> bool:
        """Return False if equal tokens may stand for other images, or logits of the whole prompt
        are wanted.
        """
        return request.params.prefill is None and not request.num_unread

    @property
    def num_kept(self) -> int:
        return self.sequences.num_kept

    def release(self, request: Request) -> None:
        if not self.holds_finished:
            self.sequences.release(request)

    def close(self) -> None:
        self.sequences.close()

    def check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            assert self.sequences.num_cached(request) == request.kv.num_cached, (
                "num_cached is not what has K/V"
            )
        if not self.holds_finished:
            self.sequences.check(requests)
