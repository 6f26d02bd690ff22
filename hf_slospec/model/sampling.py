"""Choice of tokens exactly as in transformers' ``generate``, for tree nodes and with rows in any
order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hf_slospec.engine.interfaces import Chooser
from hf_slospec.errors import InvalidInputError, UnsupportedOptionError
from hf_slospec.model.memory import is_out_of_memory
from hf_slospec.model.noise import GeneratorNoise
from hf_slospec.model.record import Record
from hf_slospec.model.transfer import to_device
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import TokenTree

# input_ids [1, length] int64 (None if it is never read), scores [num_nodes, vocab] f32 -> scores,
# same shape
Processor = Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor]
# Choices on the device, [num_choices] int64, and a function that returns choosers when the host has
# read the choices.
PendingChoices = tuple[torch.Tensor, Callable[[list[int]], list[Chooser]]]
NO_CHOICES = torch.empty(0, dtype=torch.int64, device="cpu")

MAX_BATCHED_LOGITS = (
    2**20
)  # logits per step; if there are more, a CPU processes only the nodes that are reached


class DoubledSums(TorchFunctionMode):
    """Computes running sums of one row as those of two while it is entered.

    On CUDA, the order in which torch adds up a single row changes from run to run; that of two rows
    is fixed."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, running sums along the last dimension of two rows."""
        is_sum = function in (torch.cumsum, torch.Tensor.cumsum) and args
        if is_sum and args[0].ndim == 2 and len(args[0]) == 1:
            return function(torch.cat((args[0], args[0])), *args[1:], **(kwargs or {}))[:1]
        return function(*args, **(kwargs or {}))


class StockSampler:
    """Greedy or sampling choice for one call's rows, after the call's logits processors, as in
    ``generate``.
    """

    def __init__(
        self,
        processors: Sequence[Sequence[Processor]],
        do_sample: bool,
        prompts: Sequence[Sequence[int]],
        device: torch.device,
        ignore_sequence: bool,
        record: Record,
        seed: int | None = None,
        sharing: int = 1,
        is_exact: bool = False,
        has_callbacks: bool = False,
    ):
        """Take the call's options; ``processors`` and ``prompts`` have one entry per row of the
        batch.

        Args:
            do_sample: sample; otherwise greedy.
            prompts: token ids as processors get them, left padding included.
            device: device of scores and noise.
            ignore_sequence: all rows have the same processors, none of these reads ``input_ids``,
                and no other code draws from the generator between two choices.
            record: takes the logits and scores of committed tokens.
            seed: the noise is that after ``torch.manual_seed(seed)``; None: that of the global
                generator.
            sharing: number of samplers that share the memory for noise.
            is_exact: the bits of a row's scores must not depend on the other rows.
            has_callbacks: the user's code is called while tokens are chosen, see
                :class:`RequestParams`.
        """
        self.processors = processors
        self.do_sample = do_sample
        self.prompts = prompts
        self.device = device
        self.ignore_sequence = ignore_sequence
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
        # Elsewhere, sums may depend on the number of rows.
        is_together = logits.numel() <= MAX_BATCHED_LOGITS if logits.is_cpu else not self.is_exact
        if self.ignore_sequence and (is_together or not (self.processors[0] or self.do_sample)):
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
        """Choose for all nodes at once, as a choice depends on its node's logits and position only."""
        raw = logits.to(device=self.device, dtype=torch.float32)
        scores = processed(self.processors[0], None, self.record.unshared(raw))
        if self.do_sample:
            positions_and_rows = [
                (request.num_emitted + int(depth), request.params.row)
                for request, tree in zip(requests, trees, strict=True)
                for depth in tree.depths
            ]
            choices = self._drawn(scores, positions_and_rows)
        else:
            choices = scores.argmax(-1)

        num_nodes = [tree.num_nodes for tree in trees]

        def choosers(read: list[int]) -> list[Chooser]:
            choices = _split(read, num_nodes)
            if not self.record.is_wanted:
                return [functools.partial(_choice, each) for each in choices]
            columns = requests, choices, raw.split(num_nodes), scores.split(num_nodes)
            parts = zip(*columns, strict=True)
            return [functools.partial(self._recorded_choice, *part) for part in parts]

        return choices, choosers

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
        """Record the padding token after ``tokens``, whose logits are [vocab]."""
        self.record.add(request.params.row, *self._scores(request, tokens, logits), token)

    def _scores(
        self, request: Request, tokens: Sequence[int], logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and scores of the token after ``tokens``, both [vocab] f32.

        Processors may have state: call this once per position, in order.
        """
        # The order of sums depends on the address of a view, too.
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

    def noise_after(self, requests: Sequence[Request], depth: int) -> torch.Tensor:
        """Return a copy of the noise that will choose tokens after nodes at this depth.  ->
        [num_requests, vocab] f32

        The requests must have emitted a token, as the first choice tells the size of the
        vocabulary."""
        assert self._noise is not None, "the noise of a request is known from its first token on"
        wanted = [(request.num_emitted + depth, request.params.row) for request in requests]
        return self._noise.rows(wanted, is_drawn=False)

    def _drawn(
        self, scores: torch.Tensor, positions_and_rows: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """Return the tokens that ``multinomial`` draws from scores; -1 where it would raise.  ->
        [num_drawn] int64

        Args:
            scores: [num_drawn, vocab].
            positions_and_rows: of each token, see :meth:`GeneratorNoise.rows`.
        """
        probs = scores.softmax(-1)
        self._noise = self._noise or GeneratorNoise(
            len(self.prompts), probs, self.seed, self.sharing
        )
        tokens = (probs / self._noise.rows(positions_and_rows)).argmax(-1)
        return torch.where(torch.isfinite(probs).all(-1), tokens, -1)

    def end(self, num_positions: int) -> None:
        """Leave the global generator as ``generate`` does after ``num_positions`` tokens per row."""
        if self._noise is not None:
            self._noise.end(num_positions)


def _greedy(logits: torch.Tensor, trees: Sequence[TokenTree]) -> PendingChoices:
    """Choose the most probable tokens, without processors."""
    num_nodes = [tree.num_nodes for tree in trees]
    return logits.argmax(-1), lambda read: [each.__getitem__ for each in _split(read, num_nodes)]


class RequestSamplers:
    """Samplers of requests of different calls; requests without one are greedy.

    An error in one sampler is raised by the choosers of its requests only.
    """

    def __init__(self) -> None:
        self._samplers: dict[Request, StockSampler] = {}

    def add(self, request: Request, sampler: StockSampler) -> None:
        """Choose the tokens of a request by this sampler."""
        self._samplers[request] = sampler

    def remove(self, request: Request) -> None:
        """Drop the sampler of a request, if it has one."""
        self._samplers.pop(request, None)

    def choose(
        self, requests: Sequence[Request], logits: torch.Tensor, trees: Sequence[TokenTree]
    ) -> PendingChoices:
        groups: dict[StockSampler | None, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(self._samplers.get(request), []).append(index)
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
            except BaseException as error:  # the call's processors may raise any class
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
    """Return pending choices for choosers that need nothing from the device."""
    return NO_CHOICES, lambda _: choosers


def _split(tokens: list[int], sizes: Sequence[int]) -> list[list[int]]:
    rest = iter(tokens)
    return [list(itertools.islice(rest, size)) for size in sizes]


def _raise(error: BaseException, node: int) -> int:
    raise error


def processed(
    processors: Sequence[Processor], input_ids: torch.Tensor | None, raw: torch.Tensor
) -> torch.Tensor:
    """Return raw scores after all processors.  -> [num_nodes, vocab] f32

    Raises:
        InvalidInputError: a processor returns no scores, or scores of another shape.
    """
    # Not a copy: if a processor writes into it, the logits that generate returns change, as in
    # stock
    scores = raw
    for processor in processors:
        scores = processor(input_ids, scores)
        # Fewer columns are fine, as in stock generate: the tokens behind them cannot be chosen.
        if not isinstance(scores, torch.Tensor) or scores.ndim != 2 or len(scores) != len(raw):
            shape = getattr(scores, "shape", type(scores).__name__)
            raise InvalidInputError(
                f"logits_processor {type(processor).__name__} must return scores of shape "
                f"{list(raw.shape)}, got {shape}"
            )
    return scores


def check_unchanged(name: str, input_ids: torch.Tensor, token_ids: list[int]) -> None:
    """Raise UnsupportedOptionError unless ``input_ids`` [1, length] still hold the tokens that a
    callback was given.
    """
    if input_ids[0].tolist() != token_ids:
        raise UnsupportedOptionError(
            f"{name} has changed input_ids in place, and the model has read these tokens; return other scores, or "
            "change only the last token, in a stopping criterion of a call with one row"
        )


def _choice(choices: list[int], node: int) -> int:
    return _checked(choices[node])


def _checked(token: int) -> int:
    """Return the token of a node that was reached, or raise if its distribution was invalid."""
    if token < 0:
        raise RuntimeError(
            "probabilities for sampling contain inf or nan; check the model's logits and processors"
        )
    return token
