"""Eager packed forwards: the model's own modules, run operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from hf_slospec.model.attention.backends import Backend
from hf_slospec.model.attention.forward import AloneForward
from hf_slospec.model.attention.hook import AttentionHook, run_model
from hf_slospec.model.attention.sdpa import isolated_attention
from hf_slospec.model.batch import CachedSequence, NewTokens, Plans, Span
from hf_slospec.model.inputs import ForwardInputs, ForwardTensors, Outputs, PlanKey
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.paths import ForwardPath, PathContext
from hf_slospec.model.transfer import to_device


class EagerPath(ForwardPath):
    """Computes every forward; the last path of a model that is not exact."""

    name = "eager"

    def __init__(self, context: PathContext, backend: Backend):
        self._context = context
        self.backend = backend
        self.device = context.facts.device
        self.prefills_alone = False  # prompts are processed as by stock, each as a whole and alone
        # Puts the overrides of linear layers in force.
        self.in_force: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._plans: dict[PlanKey, None] = {}  # that layers have requested so far
        # Plans of several devices are made and copied when a layer requests them.
        self._makes_plans = context.facts.kv_devices <= {self.device}

    def run(self, inputs: ForwardInputs) -> Outputs:
        batch = inputs.batch
        tensors = to_device(inputs.tensors(self._plans if self._makes_plans else ()), self.device)
        batch.plans = {key: plan.completed() for key, plan in tensors.plans.items()}
        with self._context.rope.following(self._context.rope.lengths(inputs.parts)):
            outputs = self.compute(inputs.pool, batch, tensors, batch.spans)
        self._plans |= dict.fromkeys(batch.plans)
        return outputs

    def compute(
        self,
        pool: KVPool,
        batch: Plans,
        tensors: ForwardTensors,
        spans: Sequence[Span] = (),
        backend: Backend | None = None,
    ) -> Outputs:
        """Run the model.

        Args:
            pool: storage of the batch's sequences.
            batch: the plans that layers read.
            tensors: all else that the model reads, on the device.
            spans: sequences whose states and encoders its layers read; none when replayed.
            backend: None for the model's.
        """
        context = self._context
        layers = pool, batch, backend or self.backend, context.layers, tensors.position_ids
        hook: AttentionHook = (
            AloneForward(*layers)
            if self.prefills_alone
            else context.family.new_hook(*layers, spans)
        )
        options = tensors.model_options(context.keeps_logits)
        with self.in_force():
            output = run_model(
                context.model, hook, tensors.position_ids, **tensors.model_inputs(), **options
            )
            outputs = tensors.outputs(output, context.keeps_logits)
        if not getattr(context.model, "caches_context", False):
            hook.check_attended()
        return outputs

    @torch.no_grad()
    def find_plans(self) -> list[PlanKey]:
        """Return the plans that the model's layers request, seen in a forward of one token."""
        pool = KVPool([layer.shape for layer in self._context.layers], num_slots=1)
        token = torch.zeros(1, dtype=torch.int64, device="cpu")
        mask = torch.ones(1, 1, dtype=torch.bool, device="cpu")
        part = NewTokens(CachedSequence(capacity=1), token, token, mask, is_chain=True)
        inputs = ForwardInputs(pool, [part], token)
        self.run(inputs)
        return list(inputs.batch.plans)

    def may_have_spread(self, logits: torch.Tensor) -> bool:
        """Return whether NaN of one token may have spread to tokens that do not attend to it.

        All logits of a token with NaN in its hidden states are NaN. Reading one of each makes the
        host wait for a GPU, and nodes that are attended to alone have no others' NaN.
        """
        return (
            self.device.type == "cpu"
            and not self.prefills_alone
            and bool(logits[:, :1].isnan().any())
        )

    def isolated(self, inputs: ForwardInputs) -> Outputs:
        """Compute a forward in which only tokens that attend to a token read its K and V."""
        rope = self._context.rope
        if not self._context.facts.has_own_attention:
            tensors = to_device(inputs.tensors(), self.device)
            spans = inputs.batch.spans
            with rope.following(rope.lengths(inputs.parts)):
                return self.compute(inputs.pool, inputs.batch, tensors, spans, isolated_attention)
        row = torch.zeros(1, dtype=torch.int64, device="cpu")
        outputs = [
            self.run(replace(inputs, parts=[token], logit_rows=row))
            for part in inputs.parts
            for token in part.one_by_one()
        ]
        features = [output.features for output in outputs if output.features is not None]
        logits = torch.cat([output.logits for output in outputs])
        return Outputs(logits[inputs.logit_rows], torch.cat(features) if features else None)


class ExactPath(EagerPath):
    """Computes every forward of a model whose logits are the same whatever the batch."""

    name = "exact"

    def __init__(self, context: PathContext, backend: Backend):
        super().__init__(context, backend)
        self.prefills_alone = not context.facts.is_on_cuda
