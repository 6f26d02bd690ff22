"""A target and its drafter, ready to decode batches: models, policy and engine put together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from hf_slospec.algo.calibration import Calibration
from hf_slospec.algo.latency import StepCosts
from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.loop import Engine
from hf_slospec.engine.protocols import Drafter, Policy
from hf_slospec.engine.request import Request
from hf_slospec.errors import IncompatibleDraftError
from hf_slospec.models.assistant import AssistantDrafter
from hf_slospec.models.checked_drafter import CheckedDrafter
from hf_slospec.models.measure import measure_step_costs
from hf_slospec.models.packed import PackedModel, input_device
from hf_slospec.models.prompt_lookup import PromptLookupDrafter
from hf_slospec.models.target import PackedTarget, Sampler
from hf_slospec.models.trial import check_by_trial
from hf_slospec.policies.adaserve import AdaServePolicy
from hf_slospec.policies.auto import AutoPolicy

PADDING = 1024  # ids by which vocabularies of one tokenizer may differ: embedding tables are padded to round sizes
clock = time.perf_counter  # the one clock of requests and engine: monotonic seconds


class Speculator:
    """Runs requests on a target. Between runs it keeps what it learned about the pair, and nothing of the requests."""

    def __init__(self, model: Any, assistant_model: Any | None, config: SLOSpecConfig, drafter: Drafter | None = None):
        """Without an assistant model or a drafter, prompt lookup drafts."""
        self.config, self.drafter = config, drafter
        self.models = [model] if assistant_model is None else [model, assistant_model]
        self.prepare()

    def prepare(self) -> None:
        """Look at the models as they are now: after a move or a cast, K/V and step times are others."""
        placement = [_placement(model) for model in self.models]
        if placement == getattr(self, "_placement", None):
            return
        packed = [PackedModel(model, self.config.attention) for model in self.models]
        self.target, self.draft = packed[0], packed[1] if len(packed) > 1 else None
        if self.draft is not None:
            _check_pair(self.target, self.draft)
        for model in packed:
            check_by_trial(model)
        self._placement, self._costs = placement, None
        self._calibrations = {"greedy": Calibration(Calibration.GREEDY_EXPONENT), "sampled": Calibration()}

    @property
    def costs(self) -> StepCosts:
        """Measured on first use, in a few seconds at most."""
        if self._costs is None:
            self._costs = measure_step_costs(self.target, self.draft)
        return self._costs

    def policy(self, kind: Literal["greedy", "sampled"]) -> Policy:
        """A policy for one run; acceptance is learned across runs of the same kind (greedy ones, sampled ones)."""
        if self.config.policy == "adaserve":
            return AdaServePolicy(self.config, self.costs)
        return AutoPolicy(self.config, self.costs, self._calibrations[kind])

    def new_target(self, requests: Sequence[Request], sampler: Sampler, keep: bool = False) -> PackedTarget:
        """Room for the requests' K/V; ``keep`` it readable when they are finished."""
        return PackedTarget(self.target, requests, self._max_nodes, sampler, keep)

    def run(self, requests: Sequence[Request], target: PackedTarget, on_step: Callable[[], None]) -> None:
        """Decode all requests to their ends, calling ``on_step`` after each step."""
        engine = Engine(
            target,
            self._drafter_of(requests),
            self.policy(target.sampler.kind),
            clock,
            requests,
            self.config.check_invariants,
        )
        while engine.running:
            engine.step()
            on_step()

    @property
    def _max_nodes(self) -> int:
        return self.config.max_depth * self.config.max_width

    def _drafter_of(self, requests: Sequence[Request]) -> Drafter:
        if self.drafter is not None:
            return CheckedDrafter(self.drafter, self.target.vocab_size)
        if self.draft is None:
            return PromptLookupDrafter()
        return AssistantDrafter(self.draft, requests, self._max_nodes, self.target.vocab_size)


def _placement(model: Any) -> tuple[Any, ...]:
    device, dtype = input_device(model), model.get_input_embeddings().weight.dtype
    kind = device.type
    return device, dtype, torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _check_pair(target: PackedModel, draft: PackedModel) -> None:
    smaller, larger = sorted((target.vocab_size, draft.vocab_size))
    if larger - smaller > min(PADDING, smaller / 2):
        raise IncompatibleDraftError(
            f"assistant_model has a vocabulary of {draft.vocab_size} tokens and the target one of {target.vocab_size}: "
            "more than padding would explain; use a draft that was trained with the target's tokenizer"
        )
    if target.device != draft.device:
        raise IncompatibleDraftError(
            f"assistant_model is on {draft.device} and the target on {target.device}; "
            f"move it there with assistant_model.to('{target.device}')"
        )
