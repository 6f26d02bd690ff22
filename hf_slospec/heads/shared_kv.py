"""Drafting with Gemma 4 assistant models, whose layers attend to the target's K/V cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_slospec.drafters.assistant import check_device, check_vocabulary
from hf_slospec.drafters.beam import beam_search
from hf_slospec.drafters.level import Beam, Level, Scores
from hf_slospec.drafters.methods import DraftMethod, Room, with_roots
from hf_slospec.engine.interfaces import Drafter, Plan
from hf_slospec.engine.latency_curves import ForwardCost
from hf_slospec.errors import IncompatibleDraftError
from hf_slospec.model.attention.backends import Backend
from hf_slospec.model.attention.hook import AttentionHook, active_hook
from hf_slospec.model.batch import AttentionRules, CachedSequence, PackedBatch, Span
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.measure import Size, measure
from hf_slospec.model.memory import as_memory_error
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import evaluating, input_device
from hf_slospec.model.sequences import Sequences
from hf_slospec.model.transfer import synchronize, to_device
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import IntArray, TokenTree

# Index in the target's output_hidden_states of the hidden state after the final norm.
LAST_HIDDEN = -1
SLIDING = "sliding_attention"
MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


def cached_layers(model: Any) -> dict[str, int]:
    """Return, for each layer type, the index of the last layer that caches K/V; empty for a model
    whose config has no layer types.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    num_cached = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    return {kind: layer for layer, kind in enumerate(kinds[:num_cached])}


class SharedKVModel:
    """Assistant model whose tokens attend to the target's committed tokens and not to each other.

    A node's input is the target's embedding of its token and a hidden state, concatenated. For a
    root it is the target's hidden state of the token before the root; for other nodes, the hidden
    state that the assistant returned for the parent. All nodes of a draft tree have the position
    of its root."""

    def __init__(self, assistant: Any, target: PackedModel):
        self.assistant = assistant
        self.target = target
        config = assistant.config.get_text_config()
        layers = cached_layers(target.model)
        self.layers = {kind: layers[kind] for kind in dict.fromkeys(config.layer_types)}
        # transformers' sliding-window mask is inclusive here: a root sees window + 1 keys.
        self.max_keys = {
            kind: config.sliding_window + 1 if kind == SLIDING else None for kind in self.layers
        }

    @torch.no_grad()
    def scores(
        self,
        pool: KVPool,
        sequences: Sequence[CachedSequence],
        tokens: torch.Tensor,
        states: torch.Tensor,
    ) -> Scores:
        """Return the logits of the nodes' children, and the hidden states that the children take.

        Args:
            pool: the target's K/V pool.
            sequences: [num_requests], the target's K/V slots of the committed tokens before each
                root.
            tokens: [num_requests, beam] int64, the nodes' tokens.
            states: [num_requests, beam, hidden], hidden states that the nodes take.
        """
        embeds = self.target.model.get_input_embeddings()(tokens)  # [num_requests, beam, hidden]
        # [num_requests * beam, 1, 2 * hidden]: a batch of sequences of one token
        inputs = torch.cat((embeds, states.to(embeds)), dim=-1).flatten(0, 1)[:, None]
        lengths = to_device(
            torch.tensor([sequence.length for sequence in sequences], device="cpu"), tokens.device
        )
        positions = lengths[:, None].expand_as(tokens).reshape(-1, 1)
        batches = {
            kind: _batch(sequences, tokens.shape[1], limit) for kind, limit in self.max_keys.items()
        }
        placeholders = {
            kind: (inputs.new_empty(1, 1, 1, 1), inputs.new_empty(1, 1, 1, 1))
            for kind in self.layers
        }
        forward = _SharedKVForward(pool, self.layers, batches, placeholders, self.target.backend)
        with active_hook(self.assistant, forward):
            output = self.assistant(
                inputs_embeds=inputs, position_ids=positions, shared_kv_states=placeholders
            )
        shape = *tokens.shape, -1
        return Scores(output.logits.view(shape), output.last_hidden_state.view(shape))


def _batch(sequences: Sequence[CachedSequence], beam: int, max_keys: int | None) -> PackedBatch:
    """Return a packed batch of ``beam`` tokens per sequence, each of which attends to the last
    ``max_keys`` committed tokens of its sequence; None: to all of them.
    """
    spans = []
    for index, whole in enumerate(sequences):
        num_keys = whole.length if max_keys is None else min(whole.length, max_keys)
        visible = CachedSequence(whole.start + whole.length - num_keys, num_keys, num_keys)
        no_mask = torch.empty(beam, 0, dtype=torch.bool, device="cpu")
        no_positions = torch.empty(0, dtype=torch.int64, device="cpu")
        spans.append(Span(visible, index * beam, (index + 1) * beam, no_mask, no_positions))
    return PackedBatch(spans, [span.visible for span in spans])


class _SharedKVForward(AttentionHook):
    """Attention hook of one assistant forward: each layer reads the K/V of the target's last layer
    of the same type.
    """

    def __init__(
        self,
        pool: KVPool,
        layers: Mapping[str, int],
        batches: Mapping[str, PackedBatch],
        placeholders: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        backend: Backend,
    ):
        """Make the hook of one forward; all mappings are by layer type.

        Args:
            pool: the target's K/V pool.
            layers: indices of the target's layers to read.
            batches: packed batches, whose spans take account of the sliding window.
            placeholders: K and V that the assistant gets as ``shared_kv_states``; by these objects
                the hook tells the type of the layer that calls it.
            backend: attention function of packed batches.
        """
        self.pool = pool
        self.layers = layers
        self.batches = batches
        self.backend = backend
        self._kinds = {id(key): kind for kind, (key, _) in placeholders.items()}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
        *_: Any,
    ) -> torch.Tensor:
        """Compute attention of queries [num_tokens, num_heads, 1, head_dim] over the target's K/V.

        The mask argument and the window in ``rules`` are ignored, as the batch accounts for both.

        Returns:
            [num_tokens, 1, num_heads, value_dim].
        """
        if (kind := self._kinds.get(id(key))) is None:
            raise RuntimeError(
                "a layer of the assistant does not attend to the shared K/V that it was given"
            )
        layer = self.layers[kind]
        keys = self.pool.keys[layer]
        values = self.pool.values[layer]
        query = query[:, :, 0].transpose(0, 1)  # [num_heads, num_tokens, head_dim]
        return self.backend(query, keys, values, self.batches[kind], rules._replace(window=None))[
            :, None
        ]


class SharedKVDrafter(Drafter):
    """Drafts by beam search with an assistant that reads the target's K/V and caches none itself.

    For each request, it stores the target's hidden state of the token before the root, which is an
    input of the root.
    """

    feature_layers = (LAST_HIDDEN,)

    def __init__(self, assistant: Any, vocab_size: int):
        self.assistant = assistant
        self.vocab_size = vocab_size
        # number of tokens with features, and the last one's feature [1, hidden]
        self._last: dict[Request, tuple[int, torch.Tensor]] = {}

    def read_kv_of(self, sequences: Sequences) -> None:
        self._sequences = sequences
        self._model = SharedKVModel(self.assistant, sequences.packed)

    def take_features(self, request: Request, begin: int, features: torch.Tensor) -> None:
        # Cloned, as a view would keep the features of all tokens alive.
        self._last[request] = (
            begin + len(features),
            features[-1:].clone(),
        )

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        # A request is ready if all its tokens but the root have K/V in the target's cache, and the
        # feature of the token before the root is stored; other requests get trees of a root only.
        ready = [
            request
            for request in requests
            if self._last.get(request, (0, None))[0]
            == self._sequences.num_cached(request)
            == len(request.tokens) - 1
        ]
        trees = dict[Request, TokenTree]()
        if ready:
            with as_memory_error(), evaluating(self.assistant):
                trees = dict(zip(ready, self._draft(ready, plan), strict=True))
        return with_roots(requests, trees)

    def _draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        states = torch.stack([self._last[request][1] for request in requests])
        device = self._sequences.packed.device
        return beam_search(
            requests, plan, None, partial(self._run, requests), device, states=states
        )

    def _run(self, requests: Sequence[Request], indices: IntArray, level: Level) -> Beam | Scores:
        sequences = [self._sequences.of(requests[index]) for index in indices]
        states = level.inherited_states
        assert states is not None
        scores = self._model.scores(self._sequences.cache.pool, sequences, level.tokens, states)
        return level.grown(scores._replace(logits=scores.logits[..., : self.vocab_size]))

    def release(self, request: Request) -> None:
        self._last.pop(request, None)

    def close(self) -> None:
        self._last.clear()


class LevelTimer:
    """Measures the time of one draft level, over temporarily reserved K/V slots of the target."""

    def __init__(self, assistant: Any, target: PackedModel):
        self._model = SharedKVModel(assistant, target)
        self._cache = target.kv_cache
        self.clock = target.ranks.clock

    def __call__(self, size: Size) -> float:
        """Run one level with ``size.num_tokens / size.num_requests`` nodes per request, and return
        the seconds that it took.
        """
        device = self._model.target.device
        shape = (size.num_requests, size.num_tokens // size.num_requests)
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        with self._cache.temporary([size.keys_each] * size.num_requests) as sequences:
            for sequence in sequences:
                sequence.length = size.keys_each
            begun_s = self.clock()
            states = torch.zeros(*shape, self._model.assistant.backbone_hidden_size, device=device)
            self._model.scores(self._cache.pool, sequences, tokens, states)
            synchronize(device)
            return self.clock() - begun_s


@dataclass(frozen=True, repr=False)
class Gemma4Method(DraftMethod):
    """Drafting method of a Gemma 4 assistant; see :class:`SharedKVDrafter`."""

    assistant: Any

    kind = "Gemma 4 assistant"

    feature_layers = (LAST_HIDDEN,)

    def check(self, target: Any) -> None:
        check_vocabulary(self.assistant, target)
        check_device(self.assistant, target)
        hidden = target.config.get_text_config().hidden_size
        expected = self.assistant.backbone_hidden_size
        if hidden != expected:
            raise IncompatibleDraftError(
                f"assistant_model reads hidden states of size {expected} and the target has {hidden}; use the "
                "assistant that was trained with this target"
            )
        ours = self.assistant.lm_head.weight.dtype
        dtype = target.get_input_embeddings().weight.dtype
        if ours != dtype:
            raise IncompatibleDraftError(
                f"assistant_model is in {ours} and the target in {dtype}; cast it with assistant_model.to({dtype})"
            )
        self._check_layers(target)

    def _check_layers(self, target: Any) -> None:
        """Raise IncompatibleDraftError if, for the type of any layer of the assistant, the target
        has no layer that caches K/V, or one with other K/V heads or on another device.
        """
        cached = cached_layers(target)
        kinds = self.assistant.config.get_text_config().layer_types
        for kind, layer in zip(kinds, self.assistant.model.layers, strict=True):
            if kind not in cached:
                raise IncompatibleDraftError(
                    f"assistant_model has layers of type {kind!r} and the target caches K/V of "
                    f"{sorted(cached) or 'none'}; use the assistant that was trained with this target"
                )
            source = target.get_decoder().layers[cached[kind]]
            if (ours := _kv_shape(layer.self_attn)) != (theirs := _kv_shape(source.self_attn)):
                raise IncompatibleDraftError(
                    f"layers of type {kind!r} have {ours} K/V heads and their size in assistant_model and {theirs} in "
                    "the target; use the assistant that was trained with this target"
                )
            if (device := next(source.parameters()).device) != input_device(self.assistant):
                raise IncompatibleDraftError(
                    f"assistant_model is on {input_device(self.assistant)} and the K/V that it reads on {device}; load "
                    "the target on one device"
                )

    def measure_level(self, target: PackedModel, limit_s: float) -> ForwardCost | None:
        with evaluating(self.assistant):
            return measure(LevelTimer(self.assistant, target), limit_s).fit()

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        return SharedKVDrafter(self.assistant, room.vocab_size)


def gemma4_method(model: Any, *_: Any) -> DraftMethod | None:
    """Return the drafting method if the model is a Gemma 4 assistant; None otherwise."""
    return Gemma4Method(model) if model.config.model_type in MODEL_TYPES else None


def _kv_shape(attention: Any) -> tuple[int, int]:
    """Return the number of K/V heads of an attention module, and the dimension of each."""
    return (
        attention.config.num_attention_heads // attention.num_key_value_groups,
        attention.head_dim,
    )
