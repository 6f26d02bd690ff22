"""Prompt lookup: a drafter without a model, which proposes what followed earlier occurrences of a
request's last tokens; and acceptance probabilities given the noise of sampled requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import exp, inf

import numpy as np
import torch

from hf_slospec.drafters.methods import DraftMethod, Room
from hf_slospec.drafters.past_answers import END, PastAnswers
from hf_slospec.engine.interfaces import Drafter, Plan
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import ROOT, TokenTree

# (probability, depth, token) -> probability given the noise
ProbGivenNoise = Callable[[float, int, int], float]


def prob_given_noise(request: Request, proposed: Sequence[Collection[int]]) -> ProbGivenNoise:
    """Return a function that returns the probability that the target chooses a proposed token,
    given the request's noise if it is known.

    The function takes the probability without the noise, the depth, at least 1, and the token.

    Args:
        proposed: tokens that are proposed at depths 1, 2, ...; their noise is read with one copy
            from the device.
    """
    if request.noise is None or not proposed:
        return lambda prob, depth, token: prob
    levels = [sorted(tokens) for tokens in proposed]
    noise = [request.noise.after(depth, tokens) for depth, tokens in enumerate(levels)]
    places = [(depth, token) for depth, tokens in enumerate(levels, 1) for token in tokens]
    by_place = dict(zip(places, torch.cat(noise).tolist(), strict=True))

    def given(prob: float, depth: int, token: int) -> float:
        if prob <= 0.0:
            return prob
        return exp(-by_place.get((depth, token), inf) * (1.0 - prob) / prob)

    return given


# Number of last tokens that are looked up; if they have no earlier occurrence, fewer are
MAX_NGRAM = 3
TRUST = 0.7  # conditional probability assumed for a token on which all matches agree


@dataclass(eq=False)
class PromptLookupDrafter(Drafter):
    """Prompt lookup, with several matches as branches of a tree.

    Every earlier occurrence of the request's last tokens, in its text and in past answers to its
    prompt, proposes the tokens that followed it. These continuations are merged into a tree; a
    child's conditional probability is its share of its parent's matches, times :data:`TRUST`. If
    the noise of a sampled request is known, it is the probability given that noise.
    """

    max_ngram: int = MAX_NGRAM  # maximum number of last tokens that are looked up at once
    max_depth: int | None = None  # maximum depth of trees; None: only the plan bounds it
    # Store of past answers: those to the request's prompt are searched, too, and answers of the
    # drafter's requests are added; None: there is none
    past: PastAnswers | None = None

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        return [self._tree(request, plan) for request in requests]

    def release(self, request: Request) -> None:
        """End the request's answer in the store of past answers, if there is one."""
        if self.past is not None:
            self.past.end(request)

    def _tree(self, request: Request, plan: Plan) -> TokenTree:
        # The tree grows level by level; each node of ``layer`` comes with the continuations through
        # it.
        tokens = request.tokens
        max_depth = plan.depth if self.max_depth is None else min(plan.depth, self.max_depth)
        searched = np.array(tokens)
        if self.past is not None:
            searched = np.concatenate((self.past.before(request), searched))
        matches = continuations(searched, max_depth, self.max_ngram)
        proposed = [set(level) - {None} for level in zip_longest(*matches)]
        given_noise = prob_given_noise(request, proposed)
        layer = [(ROOT, 1.0, matches)]
        nodes = [tokens[-1]]
        parents = [-1]
        depths = [0]
        path_probs = [1.0]
        for depth in range(1, max_depth + 1):
            children = []
            for parent, path_prob, runs in layer:
                going_on = [run for run in runs if len(run) >= depth]
                for token, count in Counter(run[depth - 1] for run in going_on).items():
                    through = [run for run in going_on if run[depth - 1] == token]
                    prob = given_noise(TRUST * count / len(runs), depth, token)
                    children.append((parent, path_prob * prob, token, through))
            children.sort(
                key=lambda child: -child[1]
            )  # stable: among equals the latest match is first
            layer = []
            for parent, path_prob, token, through in children[: plan.width]:
                layer.append((len(nodes), path_prob, through))
                nodes.append(token)
                parents.append(parent)
                depths.append(depth)
                path_probs.append(path_prob)
        return TokenTree(np.array(nodes), np.array(parents), np.array(depths), np.array(path_probs))


def continuations(tokens: np.ndarray, depth: int, max_ngram: int = MAX_NGRAM) -> list[list[int]]:
    """Return up to ``depth`` tokens behind each earlier occurrence of the last n tokens, with the
    largest n up to ``max_ngram`` that has an occurrence.

    The latest occurrence comes first. A continuation stops before ``END``, which follows every text
    but the last.
    """
    for length in range(min(max_ngram, len(tokens) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
        begins = np.flatnonzero((windows == tokens[-length:]).all(axis=1)) + length
        if len(begins):
            runs = [tokens[begin : begin + depth].tolist() for begin in begins[::-1]]
            return [run[: run.index(END)] if END in run else run for run in runs]
    return []


@dataclass(frozen=True, repr=False)
class LookupMethod(DraftMethod):
    """Method that drafts by prompt lookup."""

    max_ngram: int = MAX_NGRAM
    max_depth: int | None = None
    past: PastAnswers | None = None

    kind = "prompt lookup"

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        return PromptLookupDrafter(self.max_ngram, self.max_depth, self.past)
