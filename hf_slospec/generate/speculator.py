"""A target and its drafter, ready to decode batches: models, policy and engine put together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_slospec.algo.latency import ForwardCost, LatencyCurve, StepCosts
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.checked_policy import CheckedPolicy
from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.engine.protocols import Drafter, Policy
from hf_slospec.engine.request import Request
from hf_slospec.engine.scheduling.static_batch import StaticScheduler
from hf_slospec.engine.step import Engine
from hf_slospec.errors import IncompatibleDraftError
from hf_slospec.models.compatibility.hooks import changing_hooks
from hf_slospec.models.compatibility.probe import evaluating, input_device, vocab_size
from hf_slospec.models.compatibility.trial import check_by_trial
from hf_slospec.models.costs.measure import measure
from hf_slospec.models.costs.profiles import load_profile, save_profile
from hf_slospec.models.cpu.threads import release_openmp_threads, warn_if_oversubscribed
from hf_slospec.models.drafters.assistant import AssistantDrafter
from hf_slospec.models.drafters.checked import CheckedDrafter
from hf_slospec.models.drafters.prompt_lookup import PromptLookupDrafter
from hf_slospec.models.memory import MemoryUse
from hf_slospec.models.packed import PackedModel
from hf_slospec.models.target import PackedTarget, Sampler
from hf_slospec.policies import NewPolicy, max_tree_nodes, new_policy
from hf_slospec.policies.auto import SpeculationHistory

FREE = ForwardCost(LatencyCurve((1,), (0.0,)))  # drafting without a model
PADDING = 1024  # ids by which vocabularies of one tokenizer may differ: embedding tables are padded to round sizes
MEASURE_S = {"target": 8.0, "draft": 1.5}
clock = time.perf_counter  # the one clock of requests and engine: monotonic seconds


class CheckedModel:
    """A model that was tried out and found able to hold trees, and what its forwards cost.

    It is looked at anew when it was moved or cast: then K/V and times are others. Threads wait for each other, so that
    none measures the other's load.
    """

    def __init__(self, model: Any, config: SLOSpecConfig, measure_s: float):
        self.model, self.config, self.measure_s = model, config, measure_s
        self.lock = FairLock(release_openmp_threads)  # held during forwards and uses of the K/V cache
        self._lock = threading.Lock()
        self._placement: tuple[Any, ...] | None = None
        self._cost: ForwardCost | None = None
        _ = self.packed  # may refuse

    @property
    def packed(self) -> PackedModel:
        placement = _placement(self.model)
        with self._lock:
            if placement != self._placement:
                if input_device(self.model).type == "cpu":
                    warn_if_oversubscribed()
                packed = PackedModel(self.model, self.config.attention, self.config.prepack, self.config.cuda_graphs)
                check_by_trial(packed)
                self._packed, self._placement, self._cost = packed, placement, None
            return self._packed

    @property
    def cost(self) -> ForwardCost:
        """Seconds of its forwards: from the cache if it was measured on this machine before, else measured now."""
        packed = self.packed
        with self.lock, self._lock:
            if self._cost is None:
                self._cost = load_profile(packed)
            if self._cost is None:
                with evaluating(self.model):
                    self._cost = measure(packed, self.measure_s).fit()
                save_profile(packed, self._cost)
            return self._cost


class Speculator:
    """Runs requests on a target. Between runs it keeps what it learned about the pair, and nothing of the requests."""

    def __init__(
        self,
        target: CheckedModel,
        assistant_model: Any | None,
        config: SLOSpecConfig,
        drafter: Drafter | None = None,
        make_policy: NewPolicy | None = None,
    ):
        """Without an assistant model or a drafter, prompt lookup drafts."""
        self.target, self.config, self.drafter, self.make_policy = target, config, drafter, make_policy
        self.draft: CheckedModel | None = None
        if assistant_model is not None:
            _check_pair(target.model, assistant_model)
            self.draft = CheckedModel(assistant_model, config, MEASURE_S["draft"])
        self.turns = target.lock  # runs of several threads take turns, step by step
        self._costs: StepCosts | None = None
        self._experience = SpeculationHistory(config)

    def prepare(self) -> None:
        """Look at the models as they are now; refuses them if they were moved apart, say."""
        if self.draft is not None:
            _check_pair(self.target.model, self.draft.model)
            self.draft.packed.renew()
        self.target.packed.renew()

    @property
    def costs(self) -> StepCosts:
        """Kept as long as the models stay what they are: it learns while they run."""
        verify = self.target.cost
        draft_level = FREE if self.draft is None else self.draft.cost
        if self._costs is None or self._costs.verify is not verify or self._costs.draft_level is not draft_level:
            self._costs = StepCosts(verify, draft_level)
        return self._costs

    def policy(self, config: SLOSpecConfig | None = None) -> Policy:
        """A policy for one run, that of another config if one is given; what it learns is kept for the next."""
        if config is None and self.make_policy is not None:
            own = self.make_policy(self.config, self.costs)
            return CheckedPolicy(own, self.max_nodes, vocab_size(self.target.model))
        config = config or self.config
        is_same_shape = (config.max_depth, config.max_width) == (self.config.max_depth, self.config.max_width)
        return new_policy(config, self.costs, self._experience if is_same_shape else SpeculationHistory(config))

    def new_target(self, sampler: Sampler, max_slots: int | None = None, holds_finished: bool = False) -> PackedTarget:
        """Room for K/V; with ``holds_finished``, that of finished requests stays readable."""
        return PackedTarget(self.target.packed, self.max_nodes, sampler, max_slots, holds_finished)

    def run(
        self,
        requests: Sequence[Request],
        target: PackedTarget,
        on_step: Callable[[StepEvent], None],
        drafter: Drafter | None = None,
    ) -> None:
        """Decode all requests to their ends, calling ``on_step`` after each step; ``drafter`` is for this run only."""
        drafter, scheduler = drafter or self.new_drafter(), StaticScheduler(requests)
        engine = Engine(target, drafter, self.policy(), scheduler, clock, self.config.check_invariants)
        try:
            while scheduler.running:
                with self.turns:
                    event = engine.step()
                for request in requests:
                    if request.error is not None:
                        raise request.error
                on_step(event)
        finally:
            with self.turns:
                for request in scheduler.running:  # aborted by an error or the user
                    drafter.release(request)
                if isinstance(drafter, AssistantDrafter):
                    drafter.close()
            self.turns.rest()

    @property
    def models(self) -> list[PackedModel]:
        """Those that hold K/V."""
        drafts = [] if self.draft is None or not self.max_nodes else [self.draft.packed]
        return [self.target.packed, *drafts]

    def memory(self, num_running: int) -> MemoryUse:
        """Return the memory that speculation uses while ``num_running`` requests run."""
        linears = {model.model: model.linears for model in self.models}  # a target may draft for itself
        return MemoryUse(
            target_kv=self.target.packed.kv_bytes,
            draft_kv=0 if self.draft is None else self.draft.packed.kv_bytes,
            staging=num_running * self.max_nodes * sum(model.kv_bytes_per_token for model in self.models),
            prepacked=sum(own.num_bytes for own in linears.values()),
        )

    @property
    def max_nodes(self) -> int:
        """Nodes of one request's draft tree at most."""
        return max_tree_nodes(self.config, self.make_policy)

    def new_drafter(self, max_slots: int | None = None, keeps_rng: bool = True) -> Drafter:
        """``keeps_rng``: the global generator is the target's, so a user's drafter must not move it."""
        if self.draft is not None:
            return AssistantDrafter(self.draft.packed, self.max_nodes, vocab_size(self.target.model), max_slots)
        if self.drafter is None:
            return PromptLookupDrafter()
        return CheckedDrafter(self.drafter, vocab_size(self.target.model), keeps_rng)


def _placement(model: Any) -> tuple[Any, ...]:
    device, dtype = input_device(model), model.get_input_embeddings().weight.dtype
    kind = device.type
    hooks = sum(len(changing_hooks(module)) for module in model.modules())
    return device, dtype, hooks, torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _check_pair(target: Any, draft: Any) -> None:
    smaller, larger = sorted((vocab_size(target), vocab_size(draft)))
    if larger - smaller > min(PADDING, smaller / 2):
        raise IncompatibleDraftError(
            f"assistant_model has a vocabulary of {vocab_size(draft)} tokens and the target one of "
            f"{vocab_size(target)}: more than padding would explain; use a draft that was trained with the target's "
            "tokenizer"
        )
    if input_device(target) != input_device(draft):
        raise IncompatibleDraftError(
            f"assistant_model is on {input_device(draft)} and the target on {input_device(target)}; "
            f"move it there with assistant_model.to('{input_device(target)}')"
        )
