"""Coupled drafting: the draft ranks tokens with the noise that will choose the target's token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

import torch
from torch.nn.functional import pad

from hf_slospec.engine.acceptance import SHARPNESS
from hf_slospec.model.memory import is_out_of_memory
from hf_slospec.model.sampling import Processor, StockSampler, processed
from hf_slospec.request.params import Grammar
from hf_slospec.request.request import Request

logger = logging.getLogger(__name__)


class Coupling:
    """Noise of one sampled request, and the logits processors that its draft applies, too."""

    def __init__(
        self,
        sampler: StockSampler,
        request: Request,
        processors: Sequence[Processor],
        reads_text: bool,
    ):
        """``reads_text``: a processor reads ``input_ids``."""
        self.sampler = sampler
        self._request = request
        self._processors = processors
        self._reads_text = reads_text
        is_plain = all(
            isinstance(value, float | int | None)
            for one in processors
            for value in vars(one).values()
        )
        settings = (
            tuple((type(one), *sorted(vars(one).items())) for one in processors) if is_plain else ()
        )
        # Requests with equal keys can be processed together.
        self.key: Hashable = settings if is_plain and not reads_text else id(self)

    def after(self, depth: int) -> torch.Tensor:
        """Return a copy of the noise of the token after a node at this depth.  -> [vocab] f32"""
        return self.sampler.noise_after([self._request], depth)[0]

    def processed(self, scores: torch.Tensor, paths: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a beam's scores after the target's processors.

        Args:
            scores: [num_nodes, vocab] f32.
            paths: returns the tokens from below the root to each node, [num_nodes, depth] int64.
        """
        if not self._reads_text:
            return processed(self._processors, None, scores)
        input_ids = self.sampler.input_ids(self._request, self._request.tokens).expand(
            len(scores), -1
        )
        return processed(
            self._processors, torch.cat((input_ids, paths().to(input_ids.device)), dim=1), scores
        )


def is_ranked(request: Request) -> bool:
    """Return whether the ranks of proposals depend on more than the draft: on known noise or on a
    grammar.
    """
    return request.noise is not None or request.params.grammar is not None


def coupled(
    requests: Sequence[Request],
    depth: int,
    logits: torch.Tensor,
    paths: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """Return the logits that rank children: perturbed by noise where it is known, -inf where a
    grammar forbids a token.

    The target takes the token with the highest ``log p + g``, where ``g = -log(Exp(1) noise)``. The
    same sum with the draft's probabilities ranks first what the target takes most often: with one
    child, the tokens agree with a probability of at least (1 - TV) / (1 + TV), TV being the
    distributions' total variation distance (Daliri et al., arXiv 2408.07978). The softmax of the
    sums over ``SHARPNESS`` gives probabilities that calibration can start from.

    Args:
        requests: those of the beam.
        depth: depth of the nodes; 0: the roots.
        logits: [num_requests, beam, vocab], the draft's after these nodes.
        paths: returns the tokens from below the root to each node of a request, [beam, depth]
            int64.
    """
    groups: dict[Hashable, dict[int, Coupling]] = {}  # by key, then by index of the request
    grammars: dict[int, Grammar] = {}  # by index of the request
    for index, request in enumerate(requests):
        if isinstance(request.noise, Coupling):
            groups.setdefault(request.noise.key, {})[index] = request.noise
        elif request.params.grammar is not None:  # Coupled requests have it among their processors.
            grammars[index] = request.params.grammar
    if not (groups or grammars):
        return logits
    ranked = list(logits.float())
    for index, grammar in grammars.items():
        output = requests[index].tokens[requests[index].prompt_len :]
        ranked[index] = grammar.masked(
            [[*output, *path] for path in paths(index).tolist()], ranked[index]
        )
    for group in groups.values():
        first = next(iter(group))  # the only one if processors read input_ids
        noise = _noise(requests, group, depth)[:, None]  # [group, 1, vocab]
        scores = _resized(torch.stack([ranked[index] for index in group]), noise.shape[-1])
        try:
            scores = (
                group[first]
                .processed(scores.flatten(0, 1), partial(paths, first))
                .view(scores.shape)
            )
        except (
            ValueError,
            RuntimeError,
        ) as error:  # a processor made for the target's scores may refuse the draft's
            if is_out_of_memory(error):
                raise
            logger.info(
                "drafting continues without noise, as a logits processor refused the draft's scores: %r",
                error,
            )
            for index in group:
                requests[index].noise = None
            continue
        perturbed = _resized((scores - noise.log()).div_(SHARPNESS), logits.shape[-1])
        for index, beam in zip(group, perturbed, strict=True):
            ranked[index] = beam
    return torch.stack(ranked)


def _noise(requests: Sequence[Request], group: Mapping[int, Coupling], depth: int) -> torch.Tensor:
    """Return the noise of a group's requests, by one call of each sampler.  -> [group, vocab] f32"""
    by_sampler: dict[StockSampler, list[int]] = {}
    for index, coupling in group.items():
        by_sampler.setdefault(coupling.sampler, []).append(index)
    rows: dict[int, torch.Tensor] = {}
    for sampler, indices in by_sampler.items():
        noise = sampler.noise_after([requests[index] for index in indices], depth)
        if len(by_sampler) == 1:
            return noise
        rows.update(zip(indices, noise, strict=True))
    return torch.stack([rows[index] for index in group])


def _resized(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return logits of ``vocab_size`` tokens, as the vocabularies may be padded differently."""
    missing = vocab_size - logits.shape[-1]
    return pad(logits, (0, missing), value=-torch.inf) if missing else logits
