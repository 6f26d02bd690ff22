"""Drafting by several drafters: each request asks those that have been worth their time, and their trees are merged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from math import exp, inf
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.algo.calibration import Conditionals
from hf_slospec.algo.latency_curves import ForwardCost
from hf_slospec.algo.merge import merge_forests
from hf_slospec.algo.tree import ROOT, Forest, TokenTree
from hf_slospec.drafters.methods import DraftMethod, Room
from hf_slospec.engine.protocols import Clock, Drafter, Plan
from hf_slospec.engine.request import Request
from hf_slospec.errors import InvalidInputError
from hf_slospec.models.packed.model import PackedModel

Parts = tuple[int, ...]  # indices of drafters, ascending

CONFIDENT = 0.75  # share of the planned depth; later parts are skipped if one expects it to be accepted
LOOK_GAP = 4  # one step in so many asks all parts for all requests
PRIOR_LOOKS = 8  # looks, at a request or at others before it, until parts are left out
REQUEST_LOOKS, ALL_LOOKS = 16, 64  # in the average yields of a request and of all
SHIFT_RATE, MAX_SHIFT = 0.1, 3.0  # change of log-odds per unexpected acceptance or rejection; largest absolute shift
PRICE = 0.01  # tokens that a part, and merging, must gain at least
RISE = 1.1  # largest ratio of a time to the one before, as a measured one may contain a pause or a compilation
FADE = 0.1  # weight of a step in the average of committed tokens
MERGING = -1  # stands for a part among times and prices


class Yields:
    """Accepted tokens per step that sets of parts proposed, on average over looks at one request or at all."""

    def __init__(self, max_looks: int, prior: Yields | None = None):
        """``max_looks``: looks after which the oldest fade; ``prior``: yields to start from."""
        self.max_looks = max_looks
        self.num_looks: int = min(prior.num_looks, PRIOR_LOOKS) if prior else 0
        self.tokens: dict[Parts, float] = dict(prior.tokens) if prior else {}

    def observe(self, lengths: Mapping[int, int], sets: Iterable[Parts]) -> None:
        """Learn from one look.

        Args:
            lengths: accepted tokens that each part proposed in a row; lacks parts that were skipped.
            sets: sets of parts, each of which proposes as many as the best of its parts.
        """
        self.num_looks = min(self.num_looks + 1, self.max_looks)
        for parts in sets:
            if known := [lengths[part] for part in parts if part in lengths]:
                mean = self.tokens.get(parts, 0.0)
                self.tokens[parts] = mean + (max(known) - mean) / self.num_looks

    def best(self, prices: Mapping[Parts, float]) -> Parts:
        """Return the set with the highest yield less its price; the first of equal ones."""
        return max(prices, key=lambda parts: self.tokens.get(parts, 0.0) - prices[parts])


@dataclass
class Experience:
    """Yields, calibration and times of a sum's parts, over all requests.

    Threads that change it at the same time may lose an observation.
    """

    yields: Yields = field(default_factory=lambda: Yields(ALL_LOOKS))
    shifts: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # log-odds by part
    seconds: dict[int, float] = field(default_factory=dict)  # per request, of drafting by part, and of merging
    step_s: float = inf  # per request, of a whole step
    tokens: float = 1.0  # committed per request and step

    def measure(self, part: int, seconds: float) -> None:
        """Record the seconds that a part, or merging, took per request."""
        self.seconds[part] = min(seconds, RISE * self.seconds.get(part, inf))

    def measure_step(self, seconds: float, tokens: float) -> None:
        """Record the seconds and committed tokens of a step, both per request."""
        self.step_s = min(seconds, RISE * self.step_s)
        self.tokens += FADE * (tokens - self.tokens)

    def prices(self, sets: Sequence[Parts]) -> dict[Parts, float]:
        """Return the tokens that could be committed in the time that asking each set of parts takes."""
        rate, parts_and_merging = self.tokens / self.step_s, (MERGING, *sets[-1])
        price = {part: max(self.seconds.get(part, 0.0) * rate, PRICE) for part in parts_and_merging}
        return {parts: sum(price[part] for part in parts) + (len(parts) > 1) * price[MERGING] for parts in sets}


@dataclass
class _Asked:
    """A request's yields, and the trees that were proposed for it last."""

    yields: Yields
    trees: dict[int, TokenTree] = field(default_factory=dict)  # by part, calibrated; empty once they are learned from
    num_tokens: int = 0  # length of the text before the trees
    is_look: bool = False


class HybridDrafter(Drafter):
    """Asks some of several drafters for each request, and merges their trees.

    A request asks the set of parts that proposed the most accepted tokens, less those that could be committed in the
    time it takes. Parts are compared in looks, steps that ask all of them for all requests: one in ``LOOK_GAP``, and
    more at first. New requests start from the yields of all. If only one part proposes anything, nothing is merged.

    Conditionals are shifted on the scale of log-odds by what was learned about their part, so that they can be compared
    between parts. A merged tree holds the nodes of the highest probability. If a part expects ``confident`` of the
    planned depth to be accepted, the later ones are skipped for that request.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        confident: float = CONFIDENT,
        experience: Experience | None = None,
        clock: Clock = lambda: 0.0,
    ):
        """Set the parts in the order in which they draft: cheap ones first (prompt lookup, suffix trees), then a model.

        Args:
            drafters: at least one.
            confident: share of the planned depth, above 0; above 1: no part is skipped because of another one's tree.
            experience: what was learned before, and is added to; None: nothing.
            clock: measures what parts cost; if it stands still, all cost ``PRICE``, and choices depend on tokens only.
        """
        if not drafters:
            raise InvalidInputError("drafters must name at least one drafter")
        self._drafters, self.confident, self._clock = drafters, confident, clock
        self.experience = experience or Experience()
        parts = range(len(drafters))
        self._sets: list[Parts] = [chosen for size in parts for chosen in combinations(parts, size + 1)]
        self._asked: WeakKeyDictionary[Request, _Asked] = WeakKeyDictionary()
        self._num_steps, self._begun_s = 0, 0.0

    @property
    def num_one_off_forwards(self) -> int:
        return sum(drafter.num_one_off_forwards for drafter in self._drafters)

    @property
    def num_feature_bytes(self) -> int:
        return sum(drafter.num_feature_bytes for drafter in self._drafters)

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        asked = [self._of(request) for request in requests]
        self._learn_step([self._learn(*pair) for pair in zip(requests, asked, strict=True)], plan)
        chosen = self._choose(asked)
        for request, each, parts in zip(requests, asked, chosen, strict=True):
            each.num_tokens, each.is_look = len(request.tokens), parts == self._sets[-1]
        for part, drafter in enumerate(self._drafters):
            asking = [index for index, parts in enumerate(chosen) if part in parts]
            if not asking:
                continue
            begun_s, shift = self._clock(), self.experience.shifts[part]
            trees = drafter.draft([requests[index] for index in asking], plan)
            self.experience.measure(part, (self._clock() - begun_s) / len(asking))
            for index, tree in zip(asking, trees, strict=True):
                asked[index].trees[part] = tree = _shifted(tree, shift)
                if part < chosen[index][-1] and tree.path_probs.sum() - 1.0 >= self.confident * plan.depth:
                    chosen[index] = ()
        return self._merged(requests, asked, plan)

    def _of(self, request: Request) -> _Asked:
        if (asked := self._asked.get(request)) is None:
            asked = self._asked[request] = _Asked(Yields(REQUEST_LOOKS, self.experience.yields))
        return asked

    def _learn(self, request: Request, asked: _Asked) -> int:
        """Learn from the tokens that were committed since trees were proposed, if any; return their number."""
        trees, asked.trees = asked.trees, {}
        tokens, lengths = request.tokens[asked.num_tokens :] if trees else (), dict[int, int]()
        if not tokens:
            return 0
        shifts = self.experience.shifts
        for part, tree in trees.items():
            num_foreseen, surplus = _followed(tree, tokens)
            lengths[part] = min(num_foreseen, len(tokens) - 1)  # the last token was not accepted, but chosen anew
            shifts[part] = min(max(shifts[part] + SHIFT_RATE * surplus, -MAX_SHIFT), MAX_SHIFT)
        if asked.is_look:
            for yields in (asked.yields, self.experience.yields):
                yields.observe(lengths, self._sets)
        return len(tokens)

    def _learn_step(self, num_committed: Sequence[int], plan: Plan) -> None:
        """Learn from the time and tokens of the steps since the last call; 0 tokens: the request was not in them."""
        last_s, self._begun_s = self._begun_s, self._clock()
        tokens = [min(number, plan.depth + 1) for number in num_committed if number]
        if tokens and self._begun_s > last_s:
            self.experience.measure_step((self._begun_s - last_s) / len(tokens), sum(tokens) / len(tokens))

    def _choose(self, asked: Sequence[_Asked]) -> list[Parts]:
        """Return the parts to ask for each request."""
        is_look, prices = self._num_steps % LOOK_GAP == 0, self.experience.prices(self._sets)
        self._num_steps += 1
        return [
            self._sets[-1] if is_look or each.yields.num_looks < PRIOR_LOOKS else each.yields.best(prices)
            for each in asked
        ]

    def _merged(self, requests: Sequence[Request], asked: Sequence[_Asked], plan: Plan) -> list[TokenTree]:
        """Return one tree per request, the union of those that were proposed."""
        proposed = [[tree for tree in each.trees.values() if tree.num_nodes > 1] for each in asked]
        roots = [TokenTree.root_only(request.tokens[-1]) for request in requests]
        merged = [trees[0] if trees else root for trees, root in zip(proposed, roots, strict=True)]
        if several := [index for index, trees in enumerate(proposed) if len(trees) > 1]:
            begun_s = self._clock()
            columns = zip_longest(*(proposed[index] for index in several))
            forests = [
                Forest.of([tree or roots[index] for index, tree in zip(several, column, strict=True)])
                for column in columns
            ]
            conditionals = [Conditionals.of(forest).probs for forest in forests]
            trees = merge_forests(forests, conditionals, plan.depth * plan.width)
            for index, tree in zip(several, trees, strict=True):
                merged[index] = tree
            self.experience.measure(MERGING, (self._clock() - begun_s) / len(several))
        return merged

    def reuse(self, request: Request) -> int:
        return max(drafter.reuse(request) for drafter in self._drafters)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return next((reader.feature_layers for reader in self._readers), ())

    def take_features(self, request: Request, begin: int, features: Any) -> None:
        for reader in self._readers:
            reader.take_features(request, begin, features)

    def read_kv_of(self, sequences: Any) -> None:
        for drafter in self._drafters:
            drafter.read_kv_of(sequences)

    @property
    def _readers(self) -> list[Drafter]:
        return [drafter for drafter in self._drafters if drafter.feature_layers]

    def release(self, request: Request) -> None:
        if asked := self._asked.get(request):
            self._learn(request, asked)
        for drafter in self._drafters:
            drafter.release(request)

    def relieve(self) -> bool:
        has_freed = [drafter.relieve() for drafter in self._drafters]
        return any(has_freed)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()


def _followed(tree: TokenTree, tokens: Sequence[int]) -> tuple[int, float]:
    """Return how many of these tokens the tree proposed in a row, and how many more than its conditionals said.

    A node counts, verified or not, if the path to its parent was committed and a token after that is known.
    """
    probs, depths, surplus = tree.path_probs.tolist(), {ROOT: 0}, 0.0  # depths of the committed nodes
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        depth = depths.get(parent, len(tokens))
        if depth < len(tokens):
            surplus -= probs[node] / probs[parent] if probs[node] else 0.0
            if token == tokens[depth]:
                depths[node] = depth + 1
                surplus += 1.0
    return max(depths.values()), surplus


def _shifted(tree: TokenTree, log_odds: float) -> TokenTree:
    """Return the tree with its conditionals shifted on the scale of log-odds; 0 and 1 stay."""
    if not log_odds or tree.num_nodes == 1:
        return tree
    given, probs, odds = tree.path_probs.tolist(), [1.0], exp(log_odds)
    for prob, parent in zip(given[1:], tree.parents[1:].tolist(), strict=True):
        conditional = prob / given[parent] if prob else 0.0
        probs.append(probs[parent] * (conditional * odds / (1.0 - conditional + conditional * odds)))
    return TokenTree(tree.tokens, tree.parents, tree.depths, np.array(probs))


def model_before_last(kind: str) -> str:
    """Return the error message for a hybrid with a model before its last part."""
    return (
        f"the drafter {kind} has a model before its last part; at most one part may have a model, and it is written "
        "last, as in 'lookup+org/draft'"
    )


@dataclass(frozen=True, repr=False)
class HybridMethod(DraftMethod):
    """Several methods, of which each request asks some: cheap ones first; only the last may have a model."""

    methods: Sequence[DraftMethod]
    _experience: Experience = field(default_factory=Experience, init=False, compare=False)

    def __post_init__(self) -> None:
        if any(method.model is not None or method.feature_layers for method in self.methods[:-1]):
            raise InvalidInputError(model_before_last(self.kind))

    @property
    def kind(self) -> str:
        return " + ".join(method.kind for method in self.methods)

    @property
    def model(self) -> Any | None:
        return self.methods[-1].model

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.methods[-1].feature_layers

    def check(self, target: Any) -> None:
        for method in self.methods:
            method.check(target)

    def measure_level(self, target: PackedModel, limit_s: float) -> ForwardCost | None:
        return self.methods[-1].measure_level(target, limit_s)

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        drafters = [method.new_drafter(draft, room) for method in self.methods]
        if room.clock is None:
            return HybridDrafter(drafters)
        return HybridDrafter(drafters, experience=self._experience, clock=room.clock)
