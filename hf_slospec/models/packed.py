"""A transformers causal LM that forwards several sequences' tokens as one packed row."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_slospec.errors import UnsupportedModelError
from hf_slospec.models.attention import (
    MAX_DENSE,
    AttentionLayer,
    FlashAttention,
    Fresh,
    PackedForward,
    PlannedRow,
    Row,
    active_forward,
    backend_for,
)
from hf_slospec.models.graphs import Granted, Graphs, maker_for
from hf_slospec.models.kv_pool import KVPool, LayerShape, Stored
from hf_slospec.models.memory import DEVICE_ERRORS, is_out_of_memory
from hf_slospec.models.padding import MAX_GHOSTS, padded
from hf_slospec.models.parcel import sent
from hf_slospec.models.prepacked import PrepackedLinears

# A 4D mask is passed through untouched by every mask builder; nothing reads this one.
UNREAD_MASK_SHAPE = (1, 1, 1, 1)


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
        _refuse_by_declaration(model)
        self.layers = _probe(model)
        self.backend = backend_for(attention, self.layers)
        self.linears = PrepackedLinears(model, prepack)
        self._granted = Granted(model)
        self._asked: dict[Hashable, None] = {}  # plans that layers have asked for
        # Other backends read the row itself.
        self._has_plans = isinstance(self.backend, FlashAttention) and _is_on_one_device(self.layers, self.device)
        self.has_graphs = cuda_graphs and self._has_plans and maker_for(self.device) is not None

    def renew(self) -> None:
        """Look at the weights and modules anew: some changes are not noticed while steps run."""
        self.linears.renew()
        self._granted.renew()

    @property
    def device(self) -> torch.device:
        """Where a row's tokens go in."""
        return input_device(self.model)

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.model)

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
        pool = KVPool([layer.shape for layer in self.layers], num_slots, MAX_GHOSTS if has_graphs else 0)
        if has_graphs and (maker := maker_for(self.device)) is not None:
            pool.graphs = Graphs(maker, self.device)
        return pool

    @torch.no_grad()
    def forward(self, pool: KVPool, parts: Sequence[Fresh], logit_rows: torch.Tensor) -> torch.Tensor:
        """Stage the K/V of all parts' tokens and return the logits of some rows.

        Args:
            pool: where the parts' sequences live.
            parts: one per sequence; their tokens form the row in this order.
            logit_rows: [num_logits] int64, tokens of the row whose logits are wanted.

        Returns:
            [num_logits, vocab], in the model's dtype.
        """
        num_logits, graphs = len(logit_rows), pool.graphs
        if graphs is None or not self._can_replay(graphs, parts) or not (larger := padded(parts, logit_rows, pool)):
            graphs = None
        else:
            parts, logit_rows = larger
        row = Row.of(parts, is_padded=graphs is not None)
        inputs = self._inputs(row, parts, logit_rows)
        with self.linears.in_use():
            logits = None
            if graphs is not None and inputs.plans:
                logits = graphs.run(inputs, functools.partial(self._replayable, pool), self._granted.now())
            if logits is None:
                inputs = sent(inputs, self.device)
                row.plans = {key: plan.opened() for key, plan in inputs.plans.items()}
                logits = self._compute(pool, row, inputs)
                self._asked |= dict.fromkeys(row.plans)
        return logits[:num_logits]

    def _can_replay(self, graphs: Graphs, parts: Sequence[Fresh]) -> bool:
        is_usual = not any(part.embeds is not None or (part.is_chain and len(part.mask) > MAX_DENSE) for part in parts)
        is_odd = self.model.training or torch.is_autocast_enabled(self.device.type)
        return is_usual and not is_odd and self._granted.is_plain and not graphs.is_off

    def _inputs(self, row: Row, parts: Sequence[Fresh], logit_rows: torch.Tensor) -> Inputs:
        embeds = [part.embeds for part in parts if part.embeds is not None]
        assert not embeds or len(embeds) == len(parts), "all rows of a prefill have embeddings, or none"
        tokens = torch.cat(embeds or [part.input_ids for part in parts])[None]
        position_ids = torch.cat([part.positions[-len(part.input_ids) :] for part in parts])[None]
        plans = {key: key[0](row, *key[2:]) for key in self._asked} if self._has_plans else {}
        name = "inputs_embeds" if embeds else "input_ids"
        return Inputs({name: tokens}, position_ids, logit_rows, row.own_slots, plans)

    def _replayable(self, pool: KVPool, inputs: Inputs) -> torch.Tensor:
        """A forward that reads its inputs and nothing else of the row."""
        return self._compute(pool, PlannedRow(inputs.plans), inputs)

    def _compute(self, pool: KVPool, row: Row | PlannedRow, inputs: Inputs) -> torch.Tensor:
        forward = PackedForward(pool, row, inputs.own_slots, self.backend, self.layers)
        keep = {"logits_to_keep": inputs.logit_rows} if self._keeps_logits else {}
        logits = _run(self.model, forward, **inputs.tokens, position_ids=inputs.position_ids, **keep)
        return logits if keep else logits[inputs.logit_rows.to(logits.device)]


def _is_on_one_device(layers: Sequence[AttentionLayer], device: torch.device) -> bool:
    return {stored.device for layer in layers for stored in layer.shape} == {device}


def vocab_size(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def input_device(model: Any) -> torch.device:
    """The device of the embeddings; of offloaded ones, the device they are brought to."""
    embeddings = model.get_input_embeddings()
    if embeddings.weight.device.type != "meta":
        return embeddings.weight.device
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return torch.device("meta" if device is None else device)


def _run(model: Any, forward: Any, position_ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """-> [num_logits, vocab]"""
    unread_mask = torch.ones(UNREAD_MASK_SHAPE, dtype=torch.bool, device=position_ids.device)
    with active_forward(model, forward):
        return model(
            **inputs,
            attention_mask=unread_mask,
            position_ids=position_ids,
            past_key_values=forward,
            use_cache=True,
            return_dict=True,
        ).logits[0]


@contextlib.contextmanager
def refused_if_it_fails(model: Any) -> Iterator[None]:
    """A model whose forward breaks when it is tried out is refused by name, with what it said."""
    try:
        yield
    except DEVICE_ERRORS:
        raise
    except (TypeError, AttributeError, NotImplementedError, RuntimeError, ValueError, LookupError) as error:
        if isinstance(error, UnsupportedModelError) or is_out_of_memory(error):
            raise
        raise cannot_be_packed(model, f"its forward failed on a packed row with {error!r}") from error


def cannot_be_packed(model: Any, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(model).__name__} cannot be packed: {why}")


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Without dropout, whatever mode the modules are in: it would also draw from the global generator."""
    training: list[Any] = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _refuse_by_declaration(model: Any) -> None:
    """Refuse what a model says of itself: no causal decoder, recurrent state, or attention of its own."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; only decoder-only models can be speculated")
    # Some families are encoders unless told otherwise; others say is_decoder=False and are causal all the same.
    is_encoder = getattr(model.config, "is_decoder", None) is False
    if is_encoder and any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise UnsupportedModelError(f"{name} was loaded as an encoder; load it with is_decoder=True in its config")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} keeps a recurrent state, which cannot hold a tree of tokens (a rejected token cannot be undone); "
            "use a model whose layers are all attention"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{name} does not use transformers' attention interface (_supports_attention_backend is not set), so tree "
            "attention cannot be put in; use a model class that does, such as Llama, Qwen, Mistral, Gemma, GPT-2 or OPT"
        )
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(f"{name} has layers of type {sorted(unknown)}, which cannot hold a tree of tokens")


class _Probe:
    """Stands in for a packed forward once: attends plainly and notes what each layer caches and attends to."""

    def __init__(self) -> None:
        self._shapes: dict[int, LayerShape] = {}
        self._windows: dict[int, int | None] = {}  # of the layers that attend, as they pass them
        self._latent: set[int] = set()
        self._has_own_mask = False
        self._cached: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    is_initialized = False

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._shapes[layer_idx] = LayerShape(Stored.like(key), Stored.like(value))
        self._cached.append((layer_idx, key, value))
        return key, value

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        mask: torch.Tensor | None,
        window: int | None,
        **_: Any,
    ) -> torch.Tensor:
        layer = next((layer for layer, k, v in self._cached if k is key and v is value), None)
        if layer is None and self._cached and (layer := self._cached[-1][0]) not in self._windows:
            self._latent.add(layer)  # these K and V were made from what the layer has just cached
        if layer is not None:  # layers that share K and V have the same window
            self._windows.setdefault(layer, window)
        self._has_own_mask |= mask is not None and (mask.dtype != torch.bool or mask.shape != UNREAD_MASK_SHAPE)
        # One token attends to itself only, so attention is the value, repeated for the query heads of each group.
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2)

    def layers(self, model: Any) -> list[AttentionLayer]:
        """By index.  Raises UnsupportedModelError if the model cannot be packed, going by what its layers did."""
        indices = sorted(self._shapes)
        if not indices or indices != list(range(len(indices))) or self._windows.keys() != self._shapes.keys():
            raise cannot_be_packed(
                model, f"{len(indices)} layers cache keys and {len(self._windows)} of them attend through the interface"
            )
        if self._has_own_mask:
            raise cannot_be_packed(model, "its layers put something of their own into the attention mask")
        windows = [self._window(model, layer) for layer in indices]
        return [AttentionLayer(self._shapes[layer], windows[layer], layer in self._latent) for layer in indices]

    def _window(self, model: Any, layer: int) -> int | None:
        """The layer's sliding window: what it passes to its attention function, or what the config says."""
        config = model.config.get_text_config()
        kinds, declared = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        if kinds and kinds[layer] != "sliding_attention":
            return None
        passed = self._windows[layer]
        is_reached = declared and declared < getattr(config, "max_position_embeddings", math.inf)
        if is_reached and passed is None and not kinds:
            raise cannot_be_packed(
                model, f"layer {layer} may have a sliding window, but does not pass it to its attention function"
            )
        return declared if passed is None else passed


@torch.no_grad()
def _probe(model: Any) -> list[AttentionLayer]:
    """Forward one token to learn what each layer caches, and that every layer attends through the interface."""
    probe, zero = _Probe(), torch.zeros(1, 1, dtype=torch.int64, device=input_device(model))
    with evaluating(model), refused_if_it_fails(model):
        _run(model, probe, input_ids=zero, position_ids=zero)
        return probe.layers(model)
