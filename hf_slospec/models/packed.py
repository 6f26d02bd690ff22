"""A transformers causal LM that forwards several sequences' tokens as one packed row."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_slospec.models.attention import (
    MAX_DENSE,
    AttentionLayer,
    FlashAttention,
    NewTokens,
    PackedBatch,
    PackedForward,
    PlannedBatch,
    backend_for,
)
from hf_slospec.models.compatibility.probe import (
    input_device,
    probe_layers,
    refuse_by_declaration,
    run_model,
    vocab_size,
)
from hf_slospec.models.cpu.prepacked import PrepackedLinears
from hf_slospec.models.cuda.graphs import GraphPreconditions, Graphs, capturer_for
from hf_slospec.models.cuda.padding import MAX_PADDING_SLOTS, padded
from hf_slospec.models.cuda.transfer import to_device
from hf_slospec.models.kv_cache.pool import KVPool
from hf_slospec.models.memory import holders_of_idle_memory


@dataclass(frozen=True, eq=False)
class Inputs:
    """All that a forward reads beside its model, the pool, and for some backends its row."""

    tokens: dict[str, torch.Tensor]  # input_ids [1, num_tokens] int64, or inputs_embeds [1, num_tokens, hidden]
    position_ids: torch.Tensor  # [1, num_tokens] int64
    logit_rows: torch.Tensor  # [num_logits] int64
    own_slots: torch.Tensor  # [num_tokens] int64
    plans: dict[Hashable, Any]  # of the row, as its layers ask for them


class PackedModel:
    """Packed forwards of ``model``, found by trial to compute what the model computes; otherwise refused by name."""

    def __init__(self, model: Any, attention: str = "auto", prepack: bool | None = None, cuda_graphs: bool = True):
        """``prepack``: see :class:`PrepackedLinears`; ``cuda_graphs``: capture forwards, where that can be done."""
        self.model = model
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        refuse_by_declaration(model)
        self.layers = probe_layers(model)
        self.backend = backend_for(attention, self.layers)
        self.linears = PrepackedLinears(model, prepack)
        self._asked: dict[Hashable, None] = {}  # plans that layers have asked for
        # Other backends read the row itself.
        self._has_plans = isinstance(self.backend, FlashAttention) and _is_on_one_device(self.layers, self.device)
        self.has_graphs = cuda_graphs and self._has_plans and capturer_for(self.device) is not None
        self._granted = GraphPreconditions(model) if self.has_graphs else None
        self._kept: KVPool | None = None
        self._lock = threading.Lock()

    def renew(self) -> None:
        """Look at the weights and modules anew: some changes are not noticed while steps run."""
        self.linears.renew()
        if self._granted is not None:
            self._granted.renew()

    @property
    def device(self) -> torch.device:
        """Where a row's tokens go in."""
        return input_device(self.model)

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.model)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(stored.num_bytes for layer in self.layers for stored in layer.shape)

    @property
    def max_positions(self) -> int | None:
        """The longest sequence a learned position table can serve; None if the model has none such."""
        config = self.model.config.get_text_config()
        is_rotary = getattr(config, "rope_parameters", None) is not None
        return None if is_rotary else getattr(config, "max_position_embeddings", None)

    def inside(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions that a learned position table can serve, for tokens whose output will not be committed."""
        return positions if self.max_positions is None else positions.clamp(max=self.max_positions - 1)

    def known(self, tokens: torch.Tensor) -> torch.Tensor:
        """Ids that the embedding table has, for a draft whose vocabulary was padded to a smaller size."""
        return tokens.clamp(max=self.vocab_size - 1)

    def new_pool(self, num_slots: int) -> KVPool:
        has_graphs = self.has_graphs and num_slots > 0
        pool = KVPool([layer.shape for layer in self.layers], num_slots, MAX_PADDING_SLOTS if has_graphs else 0)
        if has_graphs and (maker := capturer_for(self.device)) is not None:
            pool.graphs = Graphs(maker, self.device)
        return pool

    def kept_pool(self) -> KVPool:
        """One that an earlier call has left, whose graphs go on; without such a one, an empty one."""
        with self._lock:
            pool, self._kept = self._kept, None
        is_usable = pool is not None and pool.graphs is not None and pool.graphs.is_usable
        return pool if pool is not None and is_usable else self.new_pool(0)

    def keep(self, pool: KVPool) -> None:
        """Of a call that is over: for the next one, if it has graphs and is not large."""
        if pool.graphs is not None and pool.graphs.may_keep(pool.num_bytes):
            with self._lock:
                self._kept = pool
            holders_of_idle_memory.add(self)

    def abort(self) -> None:
        """Memory is short."""
        with self._lock:
            self._kept = None

    @property
    def kept_bytes(self) -> int:
        pool = self._kept
        return 0 if pool is None else pool.num_bytes

    @torch.no_grad()
    def forward(self, pool: KVPool, parts: Sequence[NewTokens], logit_rows: torch.Tensor) -> torch.Tensor:
        """Stage the K/V of all parts' tokens and return the logits of some rows.

        Args:
            pool: where the parts' sequences live.
            parts: one per sequence; their tokens form the row in this order.
            logit_rows: [num_logits] int64, tokens of the row whose logits are wanted.

        Returns:
            [num_logits, vocab], in the model's dtype.
        """
        num_logits, larger = len(logit_rows), self._padded(pool, parts, logit_rows)
        parts, logit_rows = larger or (parts, logit_rows)
        row = PackedBatch.of(parts, is_padded=larger is not None)
        inputs = self._inputs(row, parts, logit_rows)
        with self.linears.in_use():
            logits = None
            if larger is not None and inputs.plans:
                logits = pool.graphs.run(inputs, functools.partial(self._replayable, pool), self._granted.now())
                self.has_graphs &= not pool.graphs.has_failed  # no other pool needs to try
            if logits is None:
                inputs = to_device(inputs, self.device)
                row.plans = {key: plan.with_bias() for key, plan in inputs.plans.items()}
                logits = self._compute(pool, row, inputs)
                self._asked |= dict.fromkeys(row.plans)
        return logits[:num_logits]

    def _padded(
        self, pool: KVPool, parts: Sequence[NewTokens], logit_rows: torch.Tensor
    ) -> tuple[list[NewTokens], torch.Tensor] | None:
        """None where a forward cannot be replayed anyway."""
        if self._granted is None or not self._granted.is_plain or pool.graphs is None or pool.graphs.is_off:
            return None
        if self.model.training or torch.is_autocast_enabled(self.device.type):
            return None
        if any(part.embeds is not None or (part.is_chain and len(part.mask) > MAX_DENSE) for part in parts):
            return None
        return padded(parts, logit_rows, pool)

    def _inputs(self, row: PackedBatch, parts: Sequence[NewTokens], logit_rows: torch.Tensor) -> Inputs:
        embeds = [part.embeds for part in parts if part.embeds is not None]
        assert not embeds or len(embeds) == len(parts), "all rows of a prefill have embeddings, or none"
        tokens = torch.cat(embeds or [part.input_ids for part in parts])[None]
        position_ids = torch.cat([part.positions[-len(part.input_ids) :] for part in parts])[None]
        plans = {key: key[0](row, *key[2:]) for key in self._asked} if self._has_plans else {}
        name = "inputs_embeds" if embeds else "input_ids"
        return Inputs({name: tokens}, position_ids, logit_rows, row.own_slots, plans)

    def _replayable(self, pool: KVPool, inputs: Inputs) -> torch.Tensor:
        """A forward that reads its inputs and nothing else of the row."""
        return self._compute(pool, PlannedBatch(inputs.plans), inputs)

    def _compute(self, pool: KVPool, row: PackedBatch | PlannedBatch, inputs: Inputs) -> torch.Tensor:
        forward = PackedForward(pool, row, inputs.own_slots, self.backend, self.layers)
        keep = {"logits_to_keep": inputs.logit_rows} if self._keeps_logits else {}
        logits = run_model(self.model, forward, **inputs.tokens, position_ids=inputs.position_ids, **keep)
        return logits if keep else logits[inputs.logit_rows.to(logits.device)]


def _is_on_one_device(layers: Sequence[AttentionLayer], device: torch.device) -> bool:
    return {stored.device for layer in layers for stored in layer.shape} == {device}
