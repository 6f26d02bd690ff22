"""``Speculator``: a target and one drafting method, with the costs and the acceptance measured for
the pair. It makes engines and runs them.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakSet, ref

import torch

from hf_slospec.assembly import EngineParts, new_engine
from hf_slospec.config import NewPolicy, SLOSpecConfig
from hf_slospec.drafters.methods import DraftMethod, Room
from hf_slospec.drafters.user import UserMethod
from hf_slospec.engine.checks import Checks
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.engine.interfaces import Drafter, Policy
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.errors import UnsupportedOptionError
from hf_slospec.forks import Lock, reset_in_children
from hf_slospec.model.checked_model import CheckedModel
from hf_slospec.model.memory import MemoryUse, free_memory
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import trained_len, vocab_size
from hf_slospec.model.target import PackedTarget, Sampler
from hf_slospec.model.trial import check_features
from hf_slospec.policies import max_nodes_per_request, new_policy
from hf_slospec.policies.auto import SpeculationHistory
from hf_slospec.request.request import Request

# Assumed cost of a draft level without a draft model, which takes host time only; measured steps
# correct it.
HOST_LEVEL = ForwardCost(LatencyCurve((1,), (2e-5,)), per_request_s=2e-5)
# Assumed maximum length in tokens of a model that states none and whose layers keep no K/V.
UNBOUNDED_LEN = 1 << 20
# Share of the free memory that K/V may fill. Below one half, since a pool is copied when it grows,
# which takes twice its size for a moment.
FREE_SHARE = 0.4
MEASURE_S = {"target": 2.0, "draft": 0.5}  # seconds spent on measuring the costs of a model
clock = time.perf_counter  # monotonic seconds, for requests and engine


class Learned(NamedTuple):
    """Statistics and costs that a speculator has measured, which another process can take over."""

    history: SpeculationHistory
    costs: StepCosts | None
    verify: ForwardCost | None
    draft_level: ForwardCost | None


class Speculator:
    """Runs requests on a target with one drafting method. Costs and acceptance statistics are kept
    between runs, requests are not.
    """

    def __init__(
        self,
        target: CheckedModel,
        method: DraftMethod,
        config: SLOSpecConfig,
        make_policy: NewPolicy | None = None,
    ):
        self.target = target
        self.config = config
        self.method = method
        self.make_policy = make_policy
        method.check(target.model)
        if method.feature_layers:
            if target.ranks.number > 1:
                raise UnsupportedOptionError(
                    f"drafters of the kind {method.kind!r}, which read hidden states of the target, cannot draft for a "
                    "tensor-parallel model, whose weights are split over processes; use another assistant_model, or "
                    "prompt lookup"
                )
            target.renew(self.lock, is_idle=False)
            with self.lock:
                check_features(target.packed, method.feature_layers)
        self._target_version = target.packed.version.weights
        draft = method.model
        self.draft = (
            None if draft is None else CheckedModel(draft, config, MEASURE_S["draft"], target.ranks)
        )
        # Without a draft model: the packed target for which a draft level was measured, its cost.
        self._level: tuple[PackedModel, ForwardCost] | None = None
        self._drafters = WeakSet[Drafter]()
        self._counting = Lock()
        self._costs: StepCosts | None = None
        self.history = SpeculationHistory(config)
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Drop statistics and costs in a forked child process, as another thread of the parent may
        have been updating them.
        """
        self.history = SpeculationHistory(self.config)
        self._costs = None

    @property
    def lock(self) -> FairLock:
        """Lock that is held during every step on the target."""
        return self.target.lock

    @property
    def placements(self) -> list[tuple[Any, ...]]:
        """Device, dtype and replaced forward of target and draft model; see
        :attr:`CheckedModel.place`.
        """
        return [checked.place for checked in (self.target, self.draft) if checked is not None]

    def renew(self, is_idle: bool = True) -> None:
        """Update the packed models after the user's models have changed.

        Args:
            is_idle: True if no submitted request runs; see :meth:`ModelVersion.renew`.

        Raises:
            IncompatibleDraftError: the models were moved to different devices.
            UnsupportedModelError: packed forwards of a changed model differ from its own forward.
        """
        self.method.check(self.target.model)
        self.target.renew(self.lock, is_idle)
        if self.draft is not None:
            self.draft.renew(self.lock, is_idle)
            version = self.target.packed.version.weights
            if version != self._target_version and self.method.feature_layers:
                # The draft's K/V was computed from the target's hidden states, so it is outdated.
                self.draft.packed.version.count(modules=False)
            self._target_version = version

    @property
    def costs(self) -> StepCosts:
        """The cost model of target and draft, kept until a model's costs are measured again."""
        with self.lock:  # measuring runs forwards of both models
            verify = self.target.cost
            draft_level = self._draft_level
            if (
                self._costs is None
                or self._costs.verify is not verify
                or self._costs.draft_level is not draft_level
            ):
                self._costs = StepCosts(verify, draft_level, partial(_replace_cost, ref(self)))
            return self._costs

    @property
    def _draft_level(self) -> ForwardCost:
        """Cost of a draft level. Without a draft model it is measured whenever the target was
        packed anew.
        """
        if self.draft is not None:
            return self.draft.cost
        target = self.target.packed
        if self._level is None or self._level[0] is not target:
            self._level = (
                target,
                self.method.measure_level(target, MEASURE_S["draft"]) or HOST_LEVEL,
            )
        return self._level[1]

    def _replace_cost(self, old: ForwardCost, cost: ForwardCost) -> None:
        for model in (self.target, self.draft):
            if model is not None:
                model.replace_cost(old, cost)
        if self._level is not None and self._level[1] is old:
            self._level = self._level[0], cost

    @property
    def learned(self) -> Learned:
        """Acceptance statistics and costs measured so far; they can be pickled."""
        costs = copy.copy(self._costs)
        if costs is not None:
            del costs.on_replaced
        # Reading it applies the pending outcomes, which refer to requests and cannot be pickled.
        _ = self.history.acceptance
        level = self._level and self._level[1]
        return Learned(
            self.history,
            costs,
            self.target.known_cost,
            level if self.draft is None else self.draft.known_cost,
        )

    def take_over(self, learned: Learned) -> None:
        """Continue with the statistics and costs that another process has measured."""
        self.history = learned.history
        self._costs = learned.costs
        if self._costs is not None:
            self._costs.on_replaced = partial(_replace_cost, ref(self))
        self.target.known_cost = learned.verify
        if self.draft is not None:
            self.draft.known_cost = learned.draft_level
        elif self._level is not None and learned.draft_level is not None:
            self._level = self._level[0], learned.draft_level

    @property
    def max_nodes(self) -> int:
        """Maximum number of nodes of one request's draft tree, root excluded."""
        return max_nodes_per_request(self.config, self.make_policy)

    def policy(self, costs: StepCosts, config: SLOSpecConfig | None = None) -> Policy:
        """Return the policy for one run.

        Its acceptance statistics are kept between runs, unless ``config`` has other tree limits.

        Args:
            costs: the cost model of the run.
            config: selects the policy; None: the speculator's own config and ``make_policy``.
        """
        make_policy = self.make_policy if config is None else None
        config = config or self.config
        is_same_shape = (config.max_depth, config.max_width) == (
            self.config.max_depth,
            self.config.max_width,
        )
        history = self.history if is_same_shape else SpeculationHistory(config)
        return new_policy(config, costs, history, make_policy)

    def new_target(
        self,
        sampler: Sampler,
        max_slots: int | None = None,
        max_kept: float | None = 0,
        holds_finished: bool = False,
    ) -> PackedTarget:
        """Return the target for one engine; for the arguments see :class:`PackedTarget`."""
        return PackedTarget(
            self.target.packed, self.max_nodes, sampler, max_slots, max_kept, holds_finished
        )

    def new_drafter(
        self, max_slots: int | None = None, max_kept: float | None = 0, keeps_rng: bool = True
    ) -> Drafter:
        """Return the drafter for one engine; for the arguments see :class:`Room`."""
        draft = None if self.draft is None else self.draft.packed
        room = Room(self.max_nodes, vocab_size(self.target.model), max_slots, max_kept, keeps_rng)
        drafter = self.method.new_drafter(draft, room)
        with self._counting:
            self._drafters.add(drafter)
        return drafter

    def checks(self, config: SLOSpecConfig | None) -> Checks:
        """Return which results of user code an engine checks.

        Args:
            config: selects the policy; None: the speculator's own config and ``make_policy``.
        """
        has_user_policy = config is None and self.make_policy is not None
        return Checks(
            self.max_nodes,
            vocab_size(self.target.model),
            has_user_policy,
            isinstance(self.method, UserMethod),
        )

    def parts(
        self, target: PackedTarget, drafter: Drafter, costs: StepCosts, config: SLOSpecConfig | None
    ) -> EngineParts:
        """Return the parts of an engine; ``config`` selects the policy as in :meth:`policy`."""
        if self.max_nodes:
            target.inform(drafter)
        drafter.read_kv_of(target.sequences)
        policy = self.policy(costs, config)
        clock = self.target.ranks.clock
        return EngineParts(
            target, drafter, policy, costs, clock, self.lock.released, self.checks(config)
        )

    def run(
        self,
        requests: Sequence[Request],
        target: PackedTarget,
        on_step: Callable[[StepEvent], None],
    ) -> None:
        """Decode all requests until each has finished; ``on_step`` is called after every step."""
        drafter = self.new_drafter()
        parts = self.parts(target, drafter, self.costs, None)
        engine = new_engine(
            self.config, parts, requests=requests, shares_prompts=target.shares_prompts
        )
        try:
            while engine.scheduler.running:
                with self.lock:
                    try:
                        event = engine.step()
                    except MemoryError:
                        if not engine.relieve():
                            raise
                        continue
                for request in requests:
                    if request.error is not None:
                        raise request.error
                on_step(event)
        finally:
            with self.lock:
                for request in engine.scheduler.running:  # after an error or an interrupt
                    drafter.release(request)
                drafter.close()
            self.lock.rest()

    @property
    def models(self) -> list[PackedModel]:
        """Models that hold K/V: the target, then the draft model if there is one."""
        drafts = [] if self.draft is None or not self.max_nodes else [self.draft.packed]
        return [self.target.packed, *drafts]

    def affordable_kv_tokens(self) -> int:
        """Return how many tokens of K/V fit into ``FREE_SHARE`` of the free memory.

        The result is at most what a full batch of requests of maximum length needs. The recurrent
        states of a full batch are subtracted from the memory; if all layers keep states, tokens
        take no memory.
        """
        max_batch = self.config.max_batch
        bytes_per_token = sum(model.kv_bytes_per_token for model in self.models)
        state_bytes = max_batch * sum(model.family.state_bytes for model in self.models)
        device = self.target.packed.device
        if device.type == "cuda":  # torch's allocator keeps freed memory reserved
            reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            free = torch.cuda.mem_get_info(device)[0] + reserved
        else:
            free = free_memory()
        max_len = trained_len(self.target.model) or (math.inf if bytes_per_token else UNBOUNDED_LEN)
        fitting = math.inf
        if bytes_per_token:
            fitting = max(FREE_SHARE * free - state_bytes, 0) / bytes_per_token
        return int(min(fitting, max_batch * (max_len + self.max_nodes)))

    @property
    def forwards(self) -> dict[str, str]:
        """State of the forwards of "target" and "draft": "compiled", "cuda_graphs", or "eager" with
        the reason.
        """
        target, *drafts = self.models
        layers = self.method.feature_layers if self.max_nodes else ()
        found = {"target": target.status(layers)}
        if drafts:
            found["draft"] = drafts[0].status()
        return found

    def memory(self, num_running: int) -> MemoryUse:
        """Return the memory that speculation uses in addition to the weights.

        Args:
            num_running: number of running requests.
        """
        models = self.models
        with self._counting:
            drafters = list(self._drafters)
        # One entry per model, as a target may be its own draft model.
        overrides = {model.model: model.overrides for model in models}.values()
        return MemoryUse(
            target_kv=models[0].kv_bytes,
            draft_kv=sum(model.kv_bytes for model in models[1:]),
            states=num_running * sum(model.family.state_bytes for model in models),
            features=sum(drafter.num_feature_bytes for drafter in drafters),
            staging=num_running
            * self.max_nodes
            * sum(model.kv_bytes_per_token for model in models),
            prepacked=sum(each.num_bytes for each in overrides)
            + sum(path.num_bytes for model in models for path in model.paths),
            rounded_weights=sum(each.num_rounded for each in overrides),
        )


def _replace_cost(
    speculator: ReferenceType[Speculator], old: ForwardCost, cost: ForwardCost
) -> None:
    """Replace one of a speculator's costs by a measured one. The cost model calls this with a weak
    reference, so that it does not keep the speculator in memory.
    """
    if (owner := speculator()) is not None:
        owner._replace_cost(old, cost)
