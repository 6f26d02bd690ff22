"""Choice of tokens exactly as in transformers' ``generate`` (greedy or sampled, after logits
processors), for nodes of draft trees and for rows that progress at different speeds.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from hf_slospec.engine.interfaces import Chooser
from hf_slospec.errors import InvalidInputError, UnsupportedOptionError
from hf_slospec.model.memory import is_out_of_memory
from hf_slospec.model.noise import GeneratorNoise, operators_for
from hf_slospec.model.record import Record
from hf_slospec.model.transfer import to_device
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import TokenTree

# Logits processor: (input_ids [1, length] int64, or None if the processor does not read it,
# scores [num_nodes, vocab] f32) -> scores of the same shape
Processor = Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor]
# Choices that the device may still be computing, [num_choices] int64, and a function that takes
# them on the host and returns one chooser per request.
PendingChoices = tuple[torch.Tensor, Callable[[list[int]], list[Chooser]]]
NO_CHOICES = torch.empty(0, dtype=torch.int64, device="cpu")

# Logits per step. If there are more, a CPU applies processors only to the nodes that the accepted
# path reaches, one after the other, instead of to all nodes at once.
MAX_BATCHED_LOGITS = 2**20


class DoubledSums(TorchFunctionMode):
    """Mode in which ``torch.cumsum`` of a single row is computed on two copies of the row.

    On CUDA, the order in which torch adds up a single row changes from run to run; with two rows,
    it is fixed."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch; ``cumsum`` of one row is computed on two copies of it."""
        is_sum = function in (torch.cumsum, torch.Tensor.cumsum) and args
        if is_sum and args[0].ndim == 2 and len(args[0]) == 1:
            return function(torch.cat((args[0], args[0])), *args[1:], **(kwargs or {}))[:1]
        return function(*args, **(kwargs or {}))


class StockSampler:
    """Chooses tokens for the rows of one ``generate`` call as ``generate`` does: greedy or sampled,
    after the call's logits processors.
    """

    def __init__(
        self,
        processors: Sequence[Sequence[Processor]],
        do_sample: bool,
        prompts: Sequence[Sequence[int]],
        device: torch.device,
        reads_of_length: Callable[[int], Hashable] | None,
        record: Record,
        seed: int | None = None,
        sharing: int = 1,
        is_exact: bool = False,
        has_callbacks: bool = False,
    ):
        """Take the call's options.

        Args:
            processors: logits processors of each row of the batch.
            do_sample: sample; otherwise greedy.
            prompts: token ids of each row as processors get them, left padding included.
            device: device of scores and noise.
            reads_of_length: what the processors read of a row's length: nodes with equal values are
                processed in one call. None: a processor reads tokens, rows have different ones, or
                other code draws from the generator between two choices.
            record: takes the logits and scores of committed tokens.
            seed: draw the noise as after ``torch.manual_seed(seed)``; None: draw it from the
                global generator.
            sharing: number of samplers that share the memory for noise.
            is_exact: the bits of a row's scores must not depend on the other rows.
            has_callbacks: the user's code is called while tokens are chosen, see
                :class:`RequestParams`.
        """
        self.processors = processors
        self.do_sample = do_sample
        self.prompts = prompts
        self.device = device
        self.reads_of_length = reads_of_length
        self.record = record
        self.seed = seed
        self.sharing = sharing
        self.is_exact = is_exact
        self.has_callbacks = has_callbacks
        self._noise: GeneratorNoise | None = None

    def choose(
        self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree]
    ) -> PendingChoices:
        if not requests:  # all running requests are in prefill
            return _nothing_pending([])
        if self._noise is not None:
            self._noise.forget_before(min(request.num_emitted for request in requests))
        # On devices other than CPUs, the bits of sums may depend on the number of rows.
        is_together = logits.numel() <= MAX_BATCHED_LOGITS if logits.is_cpu else not self.is_exact
        if self.reads_of_length and (is_together or not (self.processors[0] or self.do_sample)):
            return self._choose_together(requests, logits, trees)
        per_request = logits.split([tree.num_nodes for tree in trees])
        pairs = zip(requests, per_request, strict=True)
        return _nothing_pending([functools.partial(self._choose_by_path, *pair) for pair in pairs])

    def _choose_together(
        self,
        requests: Sequence[Request],
        logits: torch.Tensor,
        trees: Sequence[TokenTree],
    ) -> PendingChoices:
        """Choose for all nodes at once; to be called if a choice depends only on its node's logits
        and position.
        """
        raw = logits.to(device=self.device, dtype=torch.float32)
        positions_and_rows = [
            (request.num_emitted + depth, request.params.row)
            for request, tree in zip(requests, trees, strict=True)
            for depth in tree.depths.tolist()
        ]
        scores = self._processed_together(self.record.unshared(raw), positions_and_rows)
        choices = self._drawn(scores, positions_and_rows) if self.do_sample else scores.argmax(-1)
        num_nodes = [tree.num_nodes for tree in trees]

        def choosers(read: list[int]) -> list[Chooser]:
            choices = _split(read, num_nodes)
            if not self.record.is_wanted:
                return [functools.partial(_choice, each) for each in choices]
            columns = requests, choices, raw.split(num_nodes), scores.split(num_nodes)
            parts = zip(*columns, strict=True)
            return [functools.partial(self._recorded_choice, *part) for part in parts]

        return choices, choosers

    def _processed_together(
        self, raw: torch.Tensor, positions_and_rows: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """Apply the processors to nodes, in one call for all whose lengths make no difference to them.
        -> [num_nodes, vocab] f32

        Args:
            raw: [num_nodes, vocab] f32.
            positions_and_rows: number of new tokens before each node's choice, and its row.
        """
        assert self.reads_of_length is not None
        groups: dict[Hashable, list[int]] = {}
        lengths = [len(self.prompts[row]) + position for position, row in positions_and_rows]
        for node, length in enumerate(lengths):
            groups.setdefault(self.reads_of_length(length), []).append(node)
        scores = list[torch.Tensor]()
        for nodes in groups.values():
            # No processor reads the tokens.
            input_ids = torch.zeros(1, dtype=torch.int64, device=self.device)
            input_ids = input_ids.expand(len(nodes), lengths[nodes[0]])
            rows = raw if len(groups) == 1 else raw[nodes]
            scores.append(processed(self.processors[0], input_ids, rows))
        if len(groups) == 1:
            return scores[0]
        order = list(itertools.chain.from_iterable(groups.values()))
        return torch.cat(scores)[np.argsort(order)]

    def _recorded_choice(
        self,
        request: Request,
        choices: list[int],
        logits: torch.Tensor,
        scores: torch.Tensor,
        node: int,
    ) -> int:
        token = _choice(choices, node)
        self.record.add(request.params.row, logits[node], scores[node], token)
        return token

    def _choose_by_path(self, request: Request, logits: torch.Tensor, node: int) -> int:
        """Return the token after ``node``; the path from the root to it is already committed to
        ``request.tokens``.
        """
        row = request.params.row
        raw, scores = self._scores(request, request.tokens, logits[node])
        if self.do_sample:
            token = _checked(int(self._drawn(scores[None], [(request.num_emitted, row)])))
        else:
            token = int(scores.argmax(-1))
        self.record.add(row, raw, scores, token)
        return token

    def record_padding(
        self, request: Request, tokens: Sequence[int], logits: torch.Tensor, token: int
    ) -> None:
        """Record a padding token of a row that has ended.

        Args:
            request: the row's request.
            tokens: the tokens before the padding token.
            logits: [vocab], after ``tokens``.
            token: the padding token.
        """
        self.record.add(request.params.row, *self._scores(request, tokens, logits), token)

    def _scores(
        self, request: Request, tokens: Sequence[int], logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and scores of the token after ``tokens``, both [vocab] f32.

        Processors may have state: call this once per position, in order.
        """
        # A copy, as the bits of sums also depend on where a view begins in memory.
        raw = logits[None].to(device=self.device, dtype=torch.float32, copy=self.is_exact)
        processors = self.processors[request.params.row]
        input_ids = self.input_ids(request, tokens) if processors else None
        with DoubledSums() if self.is_exact and not raw.is_cpu else contextlib.nullcontext():
            scores = processed(processors, input_ids, self.record.unshared(raw))[0]
        if self.has_callbacks and input_ids is not None:
            check_unchanged(
                "logits_processor or prefix_allowed_tokens_fn",
                input_ids,
                self._laid_out(request, tokens),
            )
        return raw[0], scores

    def input_ids(self, request: Request, tokens: Sequence[int]) -> torch.Tensor:
        """Return a request's ``input_ids`` for processors, left padding included.  -> [1, length]
        int64
        """
        token_ids = [self._laid_out(request, tokens)]
        input_ids: torch.Tensor = to_device(torch.tensor(token_ids, device="cpu"), self.device)
        return input_ids

    def _laid_out(self, request: Request, tokens: Sequence[int]) -> list[int]:
        return [*self.prompts[request.params.row], *tokens[request.prompt_len :]]

    def noise_after(
        self, requests: Sequence[Request], depth: int, tokens: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return a copy of the noise that will choose tokens after nodes at this depth.

        The requests must have emitted a token, as the first choice tells the size of the
        vocabulary.

        Args:
            requests: sampled requests.
            depth: depth of the nodes.
            tokens: the tokens whose noise is wanted, infinite for those that the target has no
                logits of; None: all.

        Returns:
            [num_requests, vocab or number of tokens] f32.
        """
        assert self._noise is not None, "the noise of a request is known from its first token on"
        wanted = [(request.num_emitted + depth, request.params.row) for request in requests]
        rows = self._noise.rows(wanted, is_drawn=False)
        if tokens is None:
            return torch.stack(rows)
        size = self._noise.shape[1]
        index = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        picked = torch.stack(
            [row[to_device(index.clamp(max=size - 1), row.device)] for row in rows]
        )
        if max(tokens, default=0) >= size:
            picked[:, to_device(index >= size, picked.device)] = torch.inf
        return picked

    def _drawn(
        self, scores: torch.Tensor, positions_and_rows: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """Return the tokens that ``torch.multinomial`` would draw; -1 where it would raise.  ->
        [num_drawn] int64

        Args:
            scores: [num_drawn, vocab], after processors.
            positions_and_rows: position and row of each token, see :meth:`GeneratorNoise.rows`.
        """
        probs = scores.softmax(-1)
        self._noise = self._noise or GeneratorNoise(
            len(self.prompts), probs, self.seed, self.sharing
        )
        return operators_for(probs).choose(probs, self._noise.rows(positions_and_rows))

    def end(self, num_positions: int) -> None:
        """Set the global generator to its state after ``generate`` has drawn ``num_positions``
        tokens per row.
        """
        if self._noise is not None:
            self._noise.end(num_positions)


def _greedy(logits: torch.Tensor, trees: Sequence[TokenTree]) -> PendingChoices:
    """Choose the most probable token after each node, without processors."""
    num_nodes = [tree.num_nodes for tree in trees]
    return logits.argmax(-1), lambda read: [each.__getitem__ for each in _split(read, num_nodes)]


class RequestSamplers(dict[Request, StockSampler]):
    """Samplers by request, for requests of different calls; requests without a sampler are greedy.

    An error in one sampler is raised only when the choosers of its requests are called.
    """

    def choose(
        self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree]
    ) -> PendingChoices:
        groups: dict[StockSampler | None, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(self.get(request), []).append(index)
        by_request = logits.split([tree.num_nodes for tree in trees])
        pending: list[PendingChoices] = []
        for sampler, group in groups.items():
            is_only = len(group) == len(requests)
            group_logits = logits if is_only else torch.cat([by_request[i] for i in group])
            group_trees = [trees[i] for i in group]
            if sampler is None:
                pending.append(_greedy(group_logits, group_trees))
                continue
            try:
                pending.append(
                    sampler.choose([requests[i] for i in group], group_logits, group_trees)
                )
            except BaseException as error:  # a user's processor may raise an error of any class
                if is_out_of_memory(error):
                    raise
                pending.append(_nothing_pending([functools.partial(_raise, error)] * len(group)))

        def choosers(read: list[int]) -> list[Chooser]:
            by_index: dict[int, Chooser] = {}
            parts = _split(read, [len(choices) for choices, _ in pending])
            for group, part, (_, make) in zip(groups.values(), parts, pending, strict=True):
                by_index.update(zip(group, make(part), strict=True))
            return [by_index[index] for index in range(len(requests))]

        all_choices = [choices.to(logits.device) for choices, _ in pending if len(choices)]
        return torch.cat(all_choices) if all_choices else NO_CHOICES, choosers


def _nothing_pending(choosers: list[Chooser]) -> PendingChoices:
    """Wrap choosers that do not wait for the device as pending choices."""
    return NO_CHOICES, lambda _: choosers


def _split(tokens: list[int], sizes: Sequence[int]) -> list[list[int]]:
    rest = iter(tokens)
    return [list(itertools.islice(rest, size)) for size in sizes]


def _raise(error: BaseException, node: int) -> int:
    raise error


def processed(
    processors: Sequence[Processor], input_ids: torch.Tensor | None, raw: torch.Tensor
) -> torch.Tensor:
    """Apply all processors to the logits of nodes.  -> [num_nodes, vocab] f32

    Raises:
        InvalidInputError: a processor returns no scores, or scores of another shape.
    """
    # No copy: a processor that writes into the scores changes the logits that generate returns, as
    # it does in stock generate.
    scores = raw
    for processor in processors:
        scores = processor(input_ids, scores)
        # Fewer columns are allowed, as in stock generate: the missing tokens cannot be chosen.
        if not isinstance(scores, torch.Tensor) or scores.ndim != 2 or len(scores) != len(raw):
            shape = getattr(scores, "shape", type(scores).__name__)
            raise InvalidInputError(
                f"logits_processor {type(processor).__name__} must return scores of shape "
                f"{list(raw.shape)}, got {shape}"
            )
    return scores


def check_unchanged(name: str, input_ids: torch.Tensor, token_ids: list[int]) -> None:
    """Raise UnsupportedOptionError if a callback has changed ``input_ids`` in place.

    Args:
        name: option that the callback was passed as, for the message.
        input_ids: [1, length], as after the callback.
        token_ids: the tokens that the callback was given.
    """
    if input_ids[0].tolist() != token_ids:
        raise UnsupportedOptionError(
            f"{name} has changed input_ids in place, and the model has read these tokens; return other scores, or "
            "change only the last token, in a stopping criterion of a call with one row"
        )


def _choice(choices: list[int], node: int) -> int:
    return _checked(choices[node])


def _checked(token: int) -> int:
    """Return the token; raise RuntimeError if it is -1, which marks an invalid distribution."""
    if token < 0:
        raise RuntimeError(
            "probabilities for sampling contain inf or nan; check the model's logits and processors"
        )
    return token
