"""Coupled drafting: the draft ranks tokens with the same random noise that will choose the target's
token, which raises the acceptance rate of sampled requests.
"""

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
    """Noise of one sampled request, and the target's logits processors that are applied to its
    drafts.
    """

    def __init__(
        self,
        sampler: StockSampler,
        request: Request,
        processors: Sequence[Processor],
        reads_text: bool,
    ):
        """Take the request's sampler and processors.

        Args:
            sampler: chooses the target's tokens of the request.
            request: the sampled request.
            processors: logits processors of the request.
            reads_text: some processor reads ``input_ids``.
        """
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
        # Drafts of requests with equal keys can go through the processors in one call.
        self.key: Hashable = settings if is_plain and not reads_text else id(self)

    def after(self, depth: int, tokens: Sequence[int] | None = None) -> torch.Tensor:
        """Return a copy of the noise of the token after a node at this depth; see
        :meth:`StockSampler.noise_after`.  -> [vocab or number of tokens] f32
        """
        return self.sampler.noise_after([self._request], depth, tokens)[0]

    def processed(self, scores: torch.Tensor, paths: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Apply the target's processors to the draft's scores of one request.

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
    """Return whether the request's proposals are ranked by more than the draft's probabilities: by
    known noise or by a grammar.
    """
    return request.noise is not None or request.params.grammar is not None


def coupled(
    requests: Sequence[Request],
    depth: int,
    logits: torch.Tensor,
    paths: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """Return the values by which children are ranked: the draft's logits, perturbed by noise where
    it is known, and -inf where a grammar forbids a token.

    The target takes the token with the highest ``log p + g``, where ``g = -log(Exp(1) noise)``.
    Ranking by the same sum with the draft's probabilities proposes first the token that the target
    takes most often: with one child, the tokens agree with a probability of at least (1 - TV) / (1
    + TV), TV being the total variation distance of the two distributions (Daliri et al., arXiv
    2408.07978). The sums are divided by ``SHARPNESS``, so that their softmax gives probabilities
    that calibration can start from.

    Args:
        requests: requests that are drafted for.
        depth: depth of the nodes; 0: the roots.
        logits: [num_requests, beam, vocab], the draft's logits after these nodes.
        paths: (index of a request) -> tokens from below the root to each of its nodes, [beam,
            depth] int64.

    Returns:
        [num_requests, beam, vocab].
    """
    groups: dict[Hashable, dict[int, Coupling]] = {}  # by Coupling.key, then by request index
    grammars: dict[int, Grammar] = {}  # by request index
    for index, request in enumerate(requests):
        if isinstance(request.noise, Coupling):
            groups.setdefault(request.noise.key, {})[index] = request.noise
        elif request.params.grammar is not None:  # a coupled request's processors include it
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
        first = next(iter(group))  # if processors read input_ids, the group has only this request
        noise = _noise(requests, group, depth)[:, None]  # [group, 1, vocab]
        scores = _resized(torch.stack([ranked[index] for index in group]), noise.shape[-1])
        try:
            scores = (
                group[first]
                .processed(scores.flatten(0, 1), partial(paths, first))
                .view(scores.shape)
            )
        except (ValueError, RuntimeError) as error:
            # A processor made for the target's scores may refuse the draft's.
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
    """Return the noise of a group's requests, calling each sampler once.  -> [group, vocab] f32"""
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
    """Cut logits to ``vocab_size`` tokens, or pad them with -inf: draft and target may pad their
    vocabularies differently.
    """
    missing = vocab_size - logits.shape[-1]
    return pad(logits, (0, missing), value=-torch.inf) if missing else logits
