"""Drafting from the tokens that the target found probable after the same tokens before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from hf_slospec.algo.best_first import Candidates, grown_tree
from hf_slospec.algo.calibration import Conditionals
from hf_slospec.algo.merge import merge_forests
from hf_slospec.algo.tree import FloatArray, Forest, IntArray, TokenTree
from hf_slospec.drafters.foreseen import ForeseenNoise
from hf_slospec.drafters.methods import DraftMethod, Room
from hf_slospec.engine.protocols import Drafter, Plan
from hf_slospec.engine.request import Request
from hf_slospec.forks import Lock, reset_in_children
from hf_slospec.models.packed.model import PackedModel

NUM_SUCCESSORS = 8  # per context
MIN_PROB = 0.01  # less probable successors are not kept
TRUST = 0.7  # factor on the probabilities of successors if only the last token is as before, not the one before it
MAX_CONTEXTS = 8192  # contexts per request, or per salt
MAX_SALTS = 64  # salts whose contexts are kept
NOISY = 4  # candidates per node of the tree, of which known noise selects
NOTHING: Candidates = ((), ())


class Successors:
    """Probable tokens after the last two tokens and after the last one, as the target said most recently.

    The contexts that were not recorded for the longest time are dropped.
    """

    def __init__(self, max_contexts: int = MAX_CONTEXTS) -> None:
        self.max_contexts = max_contexts
        self._of: OrderedDict[tuple[int, ...], Candidates] = OrderedDict()  # by the last token or the last two

    def __len__(self) -> int:
        return len(self._of)

    def copy(self) -> Successors:
        """Return a copy."""
        copied = Successors(self.max_contexts)
        copied._of = self._of.copy()
        return copied

    def record(self, above_root: int, tree: TokenTree, successors: IntArray, probs: FloatArray) -> None:
        """Record the successors of every node of a tree, both [num_nodes, num_successors], most probable first.

        ``above_root`` is the token before the root.
        """
        above = [above_root, *tree.tokens[tree.parents[1:]].tolist()]
        num_kept = (probs >= MIN_PROB).sum(axis=1).tolist()
        columns = (above, tree.tokens.tolist(), successors.tolist(), probs.tolist(), (TRUST * probs).tolist(), num_kept)
        for before, token, tokens, after_two, after_one, number in reversed(list(zip(*columns, strict=True))):
            kept = tokens[:number]
            for context, kept_probs in (((before, token), after_two[:number]), ((token,), after_one[:number])):
                self._of[context] = kept, kept_probs  # the first node's stays, if a tree has equal contexts
                self._of.move_to_end(context)
        while len(self) > self.max_contexts:
            self._of.popitem(last=False)

    def after(self, depth: int, before: int, token: int) -> Candidates:
        """Return the successors of a token behind another one, and their probabilities."""
        return self._of.get((before, token)) or self._of.get((token,), NOTHING)


class RecyclingDrafter(Drafter):
    """Token Recycling (arXiv 2408.08696): the target's own candidates of earlier steps, without a draft model.

    The target's most probable tokens after every verified node, rejected ones included, and after prompt tokens are
    kept by context: the last two tokens, or else the last one, as in the paper. The tree of the most probable paths
    through them is proposed. If the noise of a sampled request is known, probabilities are those given that noise.

    Contexts are the request's own. With ``shares_texts``, they are those of all requests with the same ``cache_salt``.
    Times and acceptance then leak information about prompts and outputs to all requests with that salt.

    A context takes less than a kilobyte, and a request or salt keeps at most ``MAX_CONTEXTS``.
    """

    def __init__(self, *, shares_texts: bool = False):
        """``shares_texts``: draft from what the target found probable in other requests, too."""
        self.shares_texts = shares_texts
        self._of_requests: WeakKeyDictionary[Request, Successors] = WeakKeyDictionary()
        self._of_salts: OrderedDict[str, Successors] = OrderedDict()
        self._lock = Lock()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Drop all contexts, as another thread may have been changing them."""
        self._of_requests.clear()
        self._of_salts.clear()

    @property
    def num_successors(self) -> int:
        return NUM_SUCCESSORS

    def take_successors(
        self, request: Request, begin: int, tree: TokenTree, successors: IntArray, probs: FloatArray
    ) -> None:
        with self._lock:
            self._known(request).record(_before(request, begin), tree, successors, probs)

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        max_nodes = plan.depth * plan.width
        with self._lock:
            trees = [
                grown_tree(
                    _before(request, len(request.tokens) - 1),
                    request.tokens[-1],
                    self._known(request).after,
                    plan.depth,
                    max_nodes if request.noise is None else NOISY * max_nodes,
                )
                for request in requests
            ]
        if all(request.noise is None for request in requests):
            return trees
        forest = Forest.of(trees)
        return merge_forests([forest], [_given_noise(requests, forest)], max_nodes)

    def reuse(self, request: Request) -> int:
        """Copy the contexts of another request with this prompt, of which the target processes only the end now."""
        with self._lock:
            for other, known in self._of_requests.items():
                is_equal = other.params.prompt == request.params.prompt and not other.num_emitted
                if is_equal and other.params.cache_salt == request.params.cache_salt and other is not request:
                    self._of_requests[request] = known.copy()
                    break
        return 0

    def release(self, request: Request) -> None:
        """Drop the request's own contexts; shared ones stay."""
        with self._lock:
            self._of_requests.pop(request, None)

    def _known(self, request: Request) -> Successors:
        """Return the contexts of a request."""
        if not self.shares_texts:
            return self._of_requests.setdefault(request, Successors())
        salt = request.params.cache_salt
        known = self._of_salts[salt] = self._of_salts.get(salt) or Successors()
        self._of_salts.move_to_end(salt)
        if len(self._of_salts) > MAX_SALTS:
            self._of_salts.popitem(last=False)
        return known


def _before(request: Request, index: int) -> int:
    """Return the request's token before one; -1 before the first."""
    return request.tokens[index - 1] if index else -1


def _given_noise(requests: Sequence[Request], forest: Forest) -> FloatArray:
    """Return the conditionals of the requests' trees, given noise where it is known.  -> [num_nodes] f64"""
    given, per_tree = list[float](), np.split(Conditionals.of(forest).probs, forest.starts[1:])
    for request, tree, probs in zip(requests, forest.trees, per_tree, strict=True):
        levels = [tree.tokens[tree.depths == depth].tolist() for depth in range(1, tree.max_depth + 1)]
        noise = ForeseenNoise(request, [set(level) for level in levels])
        nodes = zip(probs.tolist(), tree.depths.tolist(), tree.tokens.tolist(), strict=True)
        given += [noise.given(prob, depth, token) if depth else 1.0 for prob, depth, token in nodes]
    return np.array(given)


class RecyclingMethod(DraftMethod):
    """Token Recycling."""

    @property
    def kind(self) -> str:
        return "token recycling"

    def __init__(self, shares_texts: bool = False):
        """Make the contexts, which all engines share; see :class:`RecyclingDrafter`."""
        self._drafter = RecyclingDrafter(shares_texts=shares_texts)

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        return self._drafter
