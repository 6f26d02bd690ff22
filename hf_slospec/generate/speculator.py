"""A target and its drafter, with everything that is learned about the pair."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hf_slospec.algo.latency import ForwardCost, LatencyCurve
from hf_slospec.assembly import Parts, static_engine
from hf_slospec.config import NewPolicy, SLOSpecConfig
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.engine.protocols import Drafter, Policy
from hf_slospec.engine.request import Request
from hf_slospec.errors import IncompatibleDraftError
from hf_slospec.models.checked_model import CheckedModel
from hf_slospec.models.compatibility.probe import input_device, vocab_size
from hf_slospec.models.drafters.assistant import AssistantDrafter
from hf_slospec.models.drafters.checked import CheckedDrafter
from hf_slospec.models.drafters.prompt_lookup import PromptLookupDrafter
from hf_slospec.models.memory import MemoryUse
from hf_slospec.models.packed import PackedModel
from hf_slospec.models.target import PackedTarget, Sampler
from hf_slospec.policies import max_nodes_per_request, new_policy
from hf_slospec.policies.auto import SpeculationHistory

FREE = ForwardCost(LatencyCurve((1,), (0.0,)))  # drafting without a model
PADDING = 1024  # ids by which vocabularies of one tokenizer may differ: embedding tables are padded to round sizes
MEASURE_S = {"target": 5.0, "draft": 1.0}
clock = time.perf_counter  # the clock of requests and engine: monotonic seconds


class Speculator:
    """Runs requests on a target with one way to draft. Keeps costs and acceptance between runs, but no requests."""

    def __init__(
        self,
        target: CheckedModel,
        assistant_model: Any | None,
        config: SLOSpecConfig,
        drafter: Drafter | None = None,
        make_policy: NewPolicy | None = None,
    ):
        """Draft by the assistant model, by the drafter, or without either by prompt lookup."""
        self.target, self.config, self.drafter, self.make_policy = target, config, drafter, make_policy
        self.draft: CheckedModel | None = None
        if assistant_model is not None:
            _check_pair(target.model, assistant_model)
            self.draft = CheckedModel(assistant_model, config, MEASURE_S["draft"])
        self._costs: StepCosts | None = None
        self.history = SpeculationHistory(config)

    @property
    def lock(self) -> FairLock:
        """The lock that is held during every step on the target."""
        return self.target.lock

    def renew(self) -> None:
        """Take up changes of the models since the last call.

        Raises:
            IncompatibleDraftError: they were moved apart.
        """
        if self.draft is not None:
            _check_pair(self.target.model, self.draft.model)
            self.draft.packed.renew()
        self.target.packed.renew()

    @property
    def costs(self) -> StepCosts:
        """The cost model, kept as long as the models stay what they are."""
        with self.lock:  # measuring uses the K/V cache of both models
            verify = self.target.cost
            draft_level = FREE if self.draft is None else self.draft.cost
            if self._costs is None or self._costs.verify is not verify or self._costs.draft_level is not draft_level:
                self._costs = StepCosts(verify, draft_level, self._replace_cost)
            return self._costs

    def _replace_cost(self, old: ForwardCost, cost: ForwardCost) -> None:
        for model in (self.target, self.draft):
            if model is not None:
                model.replace_cost(old, cost)

    @property
    def max_nodes(self) -> int:
        """Nodes of one request's draft tree at most, its root not counted."""
        return max_nodes_per_request(self.config, self.make_policy)

    def policy(self, costs: StepCosts, config: SLOSpecConfig | None = None) -> Policy:
        """Return a policy for one run, that of another config if one is given; what it learns is kept."""
        make_policy = self.make_policy if config is None else None
        config = config or self.config
        is_same_shape = (config.max_depth, config.max_width) == (self.config.max_depth, self.config.max_width)
        history = self.history if is_same_shape else SpeculationHistory(config)
        return new_policy(config, costs, history, make_policy, vocab_size(self.target.model))

    def new_target(
        self, sampler: Sampler, max_slots: int | None = None, max_kept: float = 0, holds_finished: bool = False
    ) -> PackedTarget:
        """Return the target for one engine; the arguments are those of :class:`PackedTarget`."""
        return PackedTarget(self.target.packed, self.max_nodes, sampler, max_slots, max_kept, holds_finished)

    def new_drafter(self, max_slots: int | None = None, max_kept: float = 0, keeps_rng: bool = True) -> Drafter:
        """Return the drafter for one engine.

        ``max_slots`` and ``max_kept`` are those of :class:`AssistantDrafter`. ``keeps_rng`` restores the global
        generator after a user's drafter: the target samples from it.
        """
        if self.draft is not None:
            proposed = vocab_size(self.target.model)
            return AssistantDrafter(self.draft.packed, self.max_nodes, proposed, max_slots, max_kept)
        if self.drafter is None:
            return PromptLookupDrafter()
        return CheckedDrafter(self.drafter, vocab_size(self.target.model), keeps_rng)

    def parts(self, target: PackedTarget, drafter: Drafter, costs: StepCosts, config: SLOSpecConfig | None) -> Parts:
        """Return an engine's parts, its policy that of another config if one is given."""
        return Parts(target, drafter, self.policy(costs, config), costs, clock)

    def run(
        self,
        requests: Sequence[Request],
        target: PackedTarget,
        on_step: Callable[[StepEvent], None],
    ) -> None:
        """Decode all requests to their ends, calling ``on_step`` after each step."""
        drafter = self.new_drafter()
        engine = static_engine(self.config, self.parts(target, drafter, self.costs, None), requests)
        try:
            while engine.scheduler.running:
                with self.lock:
                    event = engine.step()
                for request in requests:
                    if request.error is not None:
                        raise request.error
                on_step(event)
        finally:
            with self.lock:
                for request in engine.scheduler.running:  # left by an error or an interrupt
                    drafter.release(request)
                if isinstance(drafter, AssistantDrafter):
                    drafter.close()
            self.lock.rest()

    @property
    def models(self) -> list[PackedModel]:
        """The models that hold K/V, the target first."""
        drafts = [] if self.draft is None or not self.max_nodes else [self.draft.packed]
        return [self.target.packed, *drafts]

    def memory(self, num_running: int) -> MemoryUse:
        """Return the bytes that speculation takes beside the weights, for so many running requests."""
        models = self.models
        prepacked = {model.model: model.prepacked for model in models}.values()  # a target may draft for itself
        return MemoryUse(
            target_kv=models[0].kv_bytes,
            draft_kv=sum(model.kv_bytes for model in models[1:]),
            staging=num_running * self.max_nodes * sum(model.kv_bytes_per_token for model in models),
            prepacked=sum(own.num_bytes for own in prepacked),
            released=sum(own.num_released_bytes for own in prepacked),
            rounded_weights=sum(own.num_rounded for own in prepacked),
        )


def _check_pair(target: Any, draft: Any) -> None:
    smaller, larger = sorted((vocab_size(target), vocab_size(draft)))
    if larger - smaller > min(PADDING, smaller / 2):
        raise IncompatibleDraftError(
            f"assistant_model has a vocabulary of {vocab_size(draft)} tokens and the target one of "
            f"{vocab_size(target)}, which differ by more than padding; use a draft that was trained with the target's "
            "tokenizer"
        )
    if input_device(target) != input_device(draft):
        raise IncompatibleDraftError(
            f"assistant_model is on {input_device(draft)} and the target on {input_device(target)}; "
            f"move it there with assistant_model.to('{input_device(target)}')"
        )
