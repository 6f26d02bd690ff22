"""The target model as the engine uses it: ``verify`` runs the verification forward over draft
trees, and ``commit`` keeps the K/V of accepted nodes only.
"""

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

# Factor on the trial's tolerance for the logits after a prompt that the model's own forward
# processed: the trial takes medians over several prompts, while here a single expert that is routed
# differently may change the logits.
WHOLE_TOLERANCE = 4.0

Rows = npt.NDArray[np.int64]  # [num_rows], indices of tokens in a packed batch
NO_ROWS: Rows = np.empty(0, np.int64)


class Sampler(Protocol):
    """Interface that chooses the tokens that plain decoding would choose."""

    def choose(
        self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree]
    ) -> PendingChoices:
        """Start choosing a token after each node.

        Args:
            requests: one per tree.
            logits: [num_nodes of all trees, vocab], in the model's dtype; the nodes of each tree in
                turn, root first.

        Returns:
            The tokens that the device chooses, and a function that takes them on the host and
                returns one chooser per request.
        """


class PackedTarget(Target):
    """Target that verifies the draft trees of many requests in one packed forward."""

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
            sampler: chooses the token after each node.
            max_slots: see :class:`Sequences`.
            max_kept: see :class:`Sequences`.
            holds_finished: K/V of finished requests stays readable in ``sequences`` until
                ``close``.
        """
        self.sampler = sampler
        self.holds_finished = holds_finished
        self.sequences = Sequences(packed, max_nodes, max_slots, max_kept)
        self._reader: Drafter | None = None  # the drafter, if it reads the target's hidden states
        # [num_tokens, num_features], hidden states of the packed batch that verify() forwarded last
        self._features: torch.Tensor | None = None
        # Request -> index of its first token in that packed batch.
        self._begins: dict[Request, int] = {}

    @property
    def num_one_off_forwards(self) -> int:
        return self.sequences.packed.num_one_off_forwards

    @property
    def path(self) -> str:
        layers = () if self._reader is None else self._reader.feature_layers
        return self.sequences.packed.status(layers).partition(":")[0]

    def inform(self, drafter: Drafter) -> None:
        """Send a drafter the hidden states after its ``feature_layers``, of every token that is
        committed from now on.
        """
        self._reader = drafter if drafter.feature_layers else None

    @property
    def shares_prompts(self) -> bool:
        """Return whether requests with the same prompt can share its K/V without loss for the
        drafter.

        Not with a drafter that reads hidden states, as the target does not compute them for tokens
        with reused K/V.
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
                # Index in the batch that the prompt's first token would have.
                first = begin - sequence.length
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
        except BaseException:  # drop K/V of whole prompts again: the engine expects no change
            for request, prefilled in zip(requests, whole, strict=True):
                if prefilled is not None:
                    sequences.of(request).truncate(0)
            raise
        self._features = outputs.features
        logits, *read_logits = outputs.logits.split(
            [sum(map(len, chosen_rows)), *(len(rows) for _, rows in reads)]
        )
        # For prompts that the model's own forward processed: index of the request, and the logits
        # after the prompt by the packed forward and by the model's own forward.
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
        """Reserve slots. Raises MemoryError in all processes of a tensor-parallel model if one of
        them has too few.
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
        """Raise InvalidInputError unless all processes of the model verify the same requests and
        trees.
        """
        work = [[len(requests), len(chunks)]]
        for request, tree in zip(requests, trees, strict=True):
            work += [[request.params.max_new_tokens], self.sequences.uncached(request)]
            work += [tree.tokens.tolist(), tree.parents.tolist()]
        work += [self.sequences.uncached(chunk.request)[: chunk.num_tokens] for chunk in chunks]
        self.sequences.packed.ranks.check_equal(work)

    def _prefill_whole(self, request: Request) -> Prefilled | None:
        """Prefill a request's prompt by the model's own forward if packed forwards cannot process
        it (images, bidirectional attention).

        Returns:
            The result if only the prompt's last token is left to forward, else None.
        """
        prefill = request.params.prefill
        if prefill is None or self.sequences.num_cached(request):
            return None
        done: Prefilled = prefill()
        self.sequences.load(request, done.layers, done.length, done.position_offset, done.states)
        self.sequences.withhold(request)  # another prompt's equal tokens may stand for other images
        if len(self.sequences.uncached(request)) == 1:
            return done
        if done.last is not None:  # later tokens attend to the prompt's last token
            self.sequences.replace(request, done.last)
            self.sequences.of(request).length += 1
        return None

    def _checked(self, chooser: Chooser, logits: torch.Tensor, expected: torch.Tensor) -> Chooser:
        """Return the chooser, or one that raises UnsupportedModelError if ``logits`` differ from
        ``expected`` by more than rounding.

        Args:
            chooser: the request's chooser.
            logits: [vocab], after the prompt's last token, by the packed forward.
            expected: [vocab], the same by the model's own forward.
        """
        packed = self.sequences.packed
        error = float(relative_error(logits[None].cpu(), expected[None].cpu()))
        if error <= WHOLE_TOLERANCE * tolerance(packed):
            return chooser

        def refuse(node: int) -> int:
            raise UnsupportedModelError(
                f"{type(packed.model).__name__} cannot be used with slo_tpot and this prompt: behind it, logits of a "
                f"packed forward differ from the model's own by {error:.1%}, so its layers do something with the "
                "inputs beside the text that a packed forward does not do; use stock generate (fallback=True)"
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
        with as_memory_error():  # if the move fails, no request has committed anything
            self.sequences.cache.pool.move(source, destination)
        for request, _, rows in committed:
            self.sequences.of(request).commit(rows)
        # Without memory for it, the drafter lacks the hidden states of these tokens.
        with contextlib.suppress(MemoryError), as_memory_error():
            self._hand_over(committed)
        self._features = None

    def _hand_over(self, committed: Sequence[tuple[Request, int, Sequence[int]]]) -> None:
        """Give the drafter the hidden states of committed tokens.

        Args:
            committed: request, index of its first committed token in the request, and indices of
                the committed tokens among the request's tokens in the packed batch.
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
            # Forward these few tokens again, so that the drafter gets their hidden states.
            if 0 < num_reused - num_known < MIN_SHARED:
                self.sequences.of(request).truncate(num_known)
                return self.sequences.num_cached(request)
        return num_reused

    def num_reusable(self, request: Request) -> int:
        return self.sequences.num_reusable(request) if self._may_reuse(request) else 0

    def _may_reuse(self, request: Request) -> bool:
        """Return whether the request may use K/V of other requests. It may not if equal tokens may
        stand for other images, or if logits of the whole prompt are requested.
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
