"""Packed forwards of a transformers causal LM: new tokens of several sequences as one batch of one
row.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import numpy as np
import torch
import torch.nn.functional as F

from hf_slospec.config import SLOSpecConfig
from hf_slospec.cpu.compiled import CompiledForwards
from hf_slospec.cpu.exact import ExactProducts
from hf_slospec.cpu.packed_weights import weight_names
from hf_slospec.cpu.prepacked import PrepackedLayers
from hf_slospec.cuda.captured import MAX_PADDING_SLOTS, CapturedForwards
from hf_slospec.cuda.flash_attention import FlashAttention
from hf_slospec.cuda.fused_layers import FusedLayers
from hf_slospec.cuda.graphs import BATCHES, bucket_for
from hf_slospec.cuda.tree_attention import TreeAttention, why_no_kernel
from hf_slospec.errors import UnsupportedModelError, UnsupportedOptionError
from hf_slospec.families.cross_attention import DecoderForward
from hf_slospec.families.gathered import GatheredForward
from hf_slospec.families.ranks import Ranks
from hf_slospec.forks import Lock, reset_in_children
from hf_slospec.model.attention.backends import Backend, backend_for
from hf_slospec.model.attention.forward import PackedForward
from hf_slospec.model.attention.hook import AloneForward, forget_attributes
from hf_slospec.model.attention.sdpa import isolated_attention, masked_attention
from hf_slospec.model.batch import NewTokens, PackedBatch, PlannedBatch, Plans, Span
from hf_slospec.model.inputs import DraftLevel, Inputs, Outputs
from hf_slospec.model.kv_cache import KVCache, KVPool
from hf_slospec.model.length_rope import LengthRope
from hf_slospec.model.memory import holders_of_idle_memory
from hf_slospec.model.probe import probe_layers, refuse_by_declaration
from hf_slospec.model.properties import (
    attends_to_encoder,
    input_device,
    num_embeddings,
    vocab_size,
    watching_autocast,
)
from hf_slospec.model.run import packed_outputs
from hf_slospec.model.transfer import to_device
from hf_slospec.model.version import ModelVersion, can_be_traced

EAGER = SLOSpecConfig(compile=False)


class PackedModel:
    """Packed forwards of a model, and the K/V cache they use.

    All forwards and all uses of the cache require the model's lock.
    """

    def __init__(
        self,
        model: Any,
        config: SLOSpecConfig = EAGER,
        ranks: Ranks | None = None,
        version: ModelVersion | None = None,
    ):
        """Probe a model.

        Args:
            model: a causal LM.
            config: the settings. Of exact forwards only those of ``"self"`` are compiled, which is
                waited for, and nothing is prepacked, fused or captured.
            ranks: processes that run the model; None: those over which it is split.
            version: that of the model, if it has other users.

        Raises:
            UnsupportedModelError: the model cannot be packed.
            UnsupportedOptionError: weights of several processes cannot be prepacked, or the model
                cannot be exact.
        """
        self.model = model
        self.ranks = ranks or Ranks(model)
        self.device = input_device(model)  # input tokens are on it
        attention, prepack, compile, exact = (
            config.attention,
            config.prepack,
            config.compile,
            config.exact,
        )
        cuda_graphs = config.cuda_graphs
        fused_layers = config.fused_layers
        if self.ranks.number > 1:
            if prepack:
                raise UnsupportedOptionError(
                    f"prepack={prepack!r} cannot be combined with a tensor-parallel model: each process would choose "
                    "kernels by its own times, and what different kernels draft may differ; leave it out"
                )
            # Captured collectives and fused layers of split weights are untested.
            prepack = cuda_graphs = fused_layers = compile = False
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.attends_to_encoder = attends_to_encoder(model)
        refuse_by_declaration(model)
        with watching_autocast(model) as seen:
            self.layers, self.state_layers = probe_layers(model)
            self.autocast = (
                seen()
            )  # dtype of its products, if its forward enables autocast; otherwise None
        self.version = version or ModelVersion(model)
        # What was made of the model is of these versions.
        self._weights_version = self.version.weights
        self._modules_version = self.version.modules
        self.rope = LengthRope(model)
        self._is_on_cuda = self.device.type == "cuda"
        if exact:
            self._check_can_be_exact(exact, attention)
            prepack = False
            cuda_graphs = False
            fused_layers = False
            compile = "wait" if compile and exact == "self" else False
        is_by_path = exact and self._is_on_cuda
        self.backend = (
            TreeAttention(by_path=True) if is_by_path else backend_for(attention, self.layers)
        )
        self.compiled = CompiledForwards(
            model,
            self.layers,
            self._keeps_logits,
            compile,
            prepack,
            self.version,
            self._why_not_compiled(),
            is_invariant=bool(exact),
        )
        self.exact = exact
        self._is_exact_compiled = bool(exact) and self.compiled.is_used
        self.exact_products = ExactProducts(as_one=exact == "bits")
        self.prepacked = PrepackedLayers(model, prepack, self.autocast, not self.compiled.is_used)
        self.fused = FusedLayers(model, fused_layers and self.autocast is None)
        self._requested_plans: dict[
            Any, None
        ] = {}  # (make, device, *arguments) that layers have requested
        self._is_on_one_device = all(
            stored.device == self.device for layer in self.layers for stored in layer.shape.stored
        )
        can_replay = (
            isinstance(self.backend, (FlashAttention, TreeAttention)) and self._is_on_one_device
        )
        can_replay = (
            can_replay
            and not (self.has_states or self.attends_to_encoder)
            and self.autocast is None
        )
        self.captured = CapturedForwards(
            model, self.device, self.version.storage, cuda_graphs and can_replay
        )
        self.forget_cache()
        self._read_sizes()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Begin with an empty cache: the threads that use the present one stayed with the parent."""
        self.forget_cache()

    def forget_cache(self) -> None:
        """Drop the references to the cache, so that the next user begins with an empty one."""
        self._lock = Lock()
        self._shared: Callable[[], KVCache | None] = lambda: None  # a weak reference
        self._idle_pool: KVPool | None = None  # kept for its graphs while it has no user

    def _read_sizes(self) -> None:
        """Read what every part of a batch needs of the config, whose attributes take microseconds
        to read.
        """
        config = self.model.config.get_text_config()
        self.vocab_size = max(vocab_size(self.model), num_embeddings(self.model))
        names = ("max_position_embeddings", "max_target_positions")
        lengths = (getattr(config, name) for name in names if hasattr(config, name))
        is_rotary = getattr(config, "rope_parameters", None) is not None
        # Number of entries of the learned position table; None if the model has none.
        self.max_positions: int | None = None if is_rotary else next(lengths, None)

    def renew(self, is_idle: bool = True) -> bool:
        """Take in changes of weights and modules; argument and result are those of
        :meth:`ModelVersion.renew`.
        """
        has_changed = self.version.renew(is_idle)
        self.take_in_changes()
        return has_changed

    def take_in_changes(self) -> None:
        """Update what was made of weights and modules; another user of the version may have renewed
        it.
        """
        if self._weights_version != self.version.weights:
            self._weights_version = self.version.weights
            if self._modules_version != self.version.modules:
                self._modules_version = self.version.modules
                forget_attributes(self.model)
            self._read_sizes()  # embeddings may have been resized
            self.prepacked.renew()
            self.compiled.renew(self.version)
            self.exact_products.renew()
            self.captured.renew()

    def check_layers(self) -> None:
        """Raise UnsupportedModelError if the layers no longer attend as they did when the model was
        probed.
        """
        refuse_by_declaration(self.model)
        rope = LengthRope(self.model)
        layers = probe_layers(self.model)
        has_same_rope = (rope.max_plain, rope.modules) == (self.rope.max_plain, self.rope.modules)
        if layers != (self.layers, self.state_layers) or not has_same_rope:
            name = type(self.model).__name__
            raise UnsupportedModelError(
                f"the attention layers of {name} have changed: their number, or window, type or rotary embedding; "
                "undo the change, call disable and enable, or make a new generator"
            )

    def _check_can_be_exact(self, exact: str, attention: str) -> None:
        """Raise UnsupportedOptionError if the bits of a token's logits may depend on the batch."""
        on_cuda = self._is_on_cuda
        no_kernel = next(filter(None, map(why_no_kernel, self.layers)), None) if on_cuda else None
        reasons = {
            "its weights are split over processes": self.ranks.number > 1,
            "it is neither on a CPU nor on CUDA": not on_cuda and self.device.type != "cpu",
            "stock's bits on CUDA depend on the number of rows ('self' asks for less)": on_cuda
            and exact == "bits",
            "it has hooks, several devices, or weights of other classes than torch's": (
                on_cuda and not can_be_traced(self.model)
            ),
            "some layers keep a state": self.has_states,
            "it attends to an encoder's outputs": self.attends_to_encoder,
            "its forward enables autocast": self.autocast is not None,
            "its rotary embeddings depend on the length": self.rope.max_plain is not None,
            "some layers attend in chunks, over latent or over chosen keys": any(
                layer.is_own or layer.is_latent or layer.chunk for layer in self.layers
            ),
            "its experts multiply as many tokens at a time as choose them": any(
                len(weight_names(module)) > 1 for module in self.model.modules()
            ),
            f"attention={attention!r} has kernels of its own": (
                attention not in ("auto", "triton" if on_cuda else "sdpa")
            ),
            f"Triton's attention is not available ({no_kernel})": no_kernel is not None,
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            raise UnsupportedOptionError(
                f'exact="{exact}" is not available for {type(self.model).__name__}: {reason}; leave it out (outputs in '
                "fp32 are exact without it)"
            )

    def _why_not_compiled(self) -> str | None:
        if self.has_states:
            return "some layers keep a state"
        if self.attends_to_encoder:
            return "it attends to an encoder's outputs"
        if self.autocast is not None:
            return "its forward enables autocast"
        if self.rope.max_plain is not None:
            return "its rotary embeddings depend on the length"
        if self.backend is masked_attention:
            return "attention='4d_mask' is the plain reference"
        return None

    @property
    def prefills_alone(self) -> bool:
        """Return whether prompts have to be processed as stock does, each as a whole and alone."""
        return self.exact is not None and not (self._is_exact_compiled or self._is_on_cuda)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V per token, over all layers."""
        return sum(stored.num_bytes for layer in self.layers for stored in layer.shape.stored)

    @property
    def has_states(self) -> bool:
        """Return whether some layers keep a state instead of K and V."""
        return bool(self.state_layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence."""
        return sum(layer.num_bytes for layer in self.state_layers)

    @property
    def num_selected(self) -> int | None:
        """Number of keys that the layers' indexers select for a token; None without indexers."""
        if all(layer.shape.index_key is None for layer in self.layers):
            return None
        return int(self.model.config.get_text_config().index_topk)

    def clamp_positions(self, positions: np.ndarray) -> np.ndarray:
        """Clamp the positions of tokens that will not be committed to those of a learned position
        table.
        """
        return (
            positions
            if self.max_positions is None
            else np.minimum(positions, self.max_positions - 1)
        )

    def clamp_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """Clamp ids to the embedding table, which may be smaller than the target's."""
        clamped: np.ndarray = np.minimum(tokens, self.vocab_size - 1)
        return clamped

    @property
    def kv_cache(self) -> KVCache:
        """The cache that all users of the model share; it is freed with the last reference to it."""
        with self._lock:
            cache = self._shared()
            if cache is None:
                cache = KVCache(self._new_pool, self._idle_pool or self._new_pool(0))
                self._shared = ref(cache)
            return cache

    @property
    def kv_bytes(self) -> int:
        """Bytes of the model's K/V storage, in use or kept for graphs."""
        storage = self._shared() or self._idle_pool
        return 0 if storage is None else storage.num_bytes

    def _new_pool(self, num_slots: int) -> KVPool:
        self._idle_pool = None  # replaced by the new pool, and freed with its graphs
        num_padding_slots = MAX_PADDING_SLOTS if self.captured.is_on and num_slots else 0
        return KVPool([layer.shape for layer in self.layers], num_slots, num_padding_slots)

    def keep_if_captured(self, cache: KVCache) -> None:
        """Keep the pool of a cache that may become idle, if it is small and has captured forwards.

        An empty pool without captured forwards is freed at once, as other users may refer to the
        cache for long."""
        graphs = self.captured.by_pool.get(cache.pool)
        if not graphs:
            cache.trim()
        self._idle_pool = (
            cache.pool if graphs is not None and graphs.may_keep(cache.num_bytes) else None
        )
        holders_of_idle_memory.add(self)

    def free_idle_memory(self) -> None:
        """Free the pool that was kept for its graphs, unless it is in use."""
        self._idle_pool = None

    @property
    def num_one_off_forwards(self) -> int:
        """Number of forwards that took longer than later ones of their size will.

        They are captures, the forwards before them, and forwards that were computed twice to be
        compared."""
        counts = self.captured.counts
        return counts.captures + counts.eager + self.compiled.num_compared

    def forward(
        self, pool: KVPool, parts: Sequence[NewTokens], logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Stage the K/V of all parts' tokens and return the logits of some of them; see
        :meth:`outputs`.

        Returns:
            [num_logits, vocab], in the model's dtype.
        """
        return self.outputs(pool, parts, logit_rows).logits

    @torch.no_grad()
    def outputs(
        self,
        pool: KVPool,
        parts: Sequence[NewTokens],
        logit_rows: torch.Tensor,
        feature_layers: tuple[int, ...] = (),
    ) -> Outputs:
        """Stage the K/V of all parts' tokens; return the logits of some of them, and hidden states
        of all.

        Args:
            pool: storage of the parts' sequences.
            parts: one per sequence; their tokens form the packed batch in this order.
            logit_rows: [num_logits] int64, tokens of the packed batch whose logits to return.
            feature_layers: hidden states to return, numbered as in the model's
                ``output_hidden_states``.
        """
        num_tokens = sum(part.num_tokens for part in parts)
        num_logits = len(logit_rows)
        logits, features = self._run(pool, parts, logit_rows, feature_layers, None)
        return Outputs(logits[:num_logits], None if features is None else features[:num_tokens])

    @torch.no_grad()
    def draft(
        self, pool: KVPool, parts: Sequence[NewTokens], logit_rows: torch.Tensor, level: DraftLevel
    ) -> Any:
        """Stage the K/V of draft nodes, or of the tokens up to their roots, and return
        ``level.outputs``.

        The result may be overwritten from the model's next forward on.

        Args:
            pool: storage of the parts' sequences.
            parts: one per sequence; their ids and masks may be indices into tensors of ``level``.
            logit_rows: [num_logits] int64, tokens of the packed batch whose logits ``level`` takes;
                row 0 stands for the level's rows of padding.
            level: computation before and after the forward.
        """
        if level.num_logits > len(logit_rows):
            logit_rows = F.pad(logit_rows, (0, level.num_logits - len(logit_rows)))
        return self._run(pool, parts, logit_rows, (), level)

    def num_draft_rows(self, num_requests: int) -> int | None:
        """Return the rows, with padding, of captured levels of this many requests; few sizes need
        few graphs.

        None if levels are not captured, and may have any number of rows.
        """
        return bucket_for(num_requests, BATCHES) if self.captured.is_on else None

    def _run(
        self,
        pool: KVPool,
        parts: Sequence[NewTokens],
        logit_rows: torch.Tensor,
        feature_layers: tuple[int, ...],
        level: DraftLevel | None,
    ) -> Any:
        if self.version.is_behind:
            self.renew()
        elif level is None or level.is_root:  # a beam's other levels follow at once
            self.version.notice_writes()
        self.take_in_changes()
        self.captured.storage = self.version.storage
        self.prepacked.need(not self.compiled.is_used)
        rope_lengths = self.rope.lengths(parts)
        padding = self.captured.padded(pool, parts, logit_rows) if rope_lengths is None else None
        if padding is not None:
            padded_parts, padded_rows = padding
            batch = PackedBatch.of(padded_parts, is_padded=True)
            # The number of a level's rows is padded already.
            rows = padded_rows if level is None else logit_rows
            inputs = self._inputs(padded_parts, batch, rows, feature_layers, level)
            outputs = self.captured.run(pool, inputs, functools.partial(self._replayable, pool))
            if outputs is not None:
                return outputs
        with self.prepacked.in_use(), self.fused.in_use(), self.rope.following(rope_lengths):
            parts = parts if level is None else level.resolved(parts)
            batch = PackedBatch.of(parts)
            arguments = logit_rows, feature_layers, level
            eager = functools.partial(self._eager, pool, parts, batch, *arguments)
            outputs = None
            if self.compiled.why_not is None:
                given = Inputs.of(parts, batch, (), *arguments)
                outputs = self.compiled.run(pool, batch, given, None if self.exact else eager)
            if outputs is None and self._is_exact_compiled:
                raise UnsupportedOptionError(
                    f'exact="{self.exact}" is a matter of compiled forwards, which cannot compute this one: '
                    f"{self.compiled[feature_layers]}; call disable and enable again"
                )
            if outputs is None:
                begun_s = time.perf_counter()
                with self.compiled.beside_the_compiler():
                    outputs = eager()
                self.compiled.count(time.perf_counter() - begun_s)
            if level is None and self._may_have_spread(outputs.logits):
                outputs = self._isolated(pool, parts, logit_rows, feature_layers)
            return outputs if level is None else level.outputs(outputs.logits)

    def _eager(
        self, pool: KVPool, parts: Sequence[NewTokens], batch: PackedBatch, *others: Any
    ) -> Outputs:
        inputs = to_device(self._inputs(parts, batch, *others), self.device)
        batch.plans = {key: plan.completed() for key, plan in inputs.plans.items()}
        outputs = self._compute(pool, batch, inputs, batch.spans)
        self._requested_plans |= dict.fromkeys(batch.plans)
        return outputs

    def _may_have_spread(self, logits: torch.Tensor) -> bool:
        """Return whether NaN of one token may have spread to tokens that do not attend to it.

        All logits of a token with NaN in its hidden states are NaN. Reading one of each makes the
        host wait for a GPU, and nodes that are attended to alone have no others' NaN.
        """
        return (
            self.device.type == "cpu"
            and not self.prefills_alone
            and bool(logits[:, :1].isnan().any())
        )

    def _isolated(
        self,
        pool: KVPool,
        parts: Sequence[NewTokens],
        logit_rows: torch.Tensor,
        feature_layers: tuple[int, ...],
    ) -> Outputs:
        """Compute a forward so that K and V of a token are read only by tokens that attend to it."""
        if not any(layer.is_own for layer in self.layers):
            batch = PackedBatch.of(parts)
            inputs = Inputs.of(parts, batch, (), logit_rows, feature_layers)
            return self._compute(
                pool, batch, to_device(inputs, self.device), batch.spans, isolated_attention
            )
        outputs = [
            self._eager(
                pool,
                [token],
                PackedBatch.of([token]),
                torch.tensor([0], device="cpu"),
                feature_layers,
                None,
            )
            for part in parts
            for token in part.one_by_one()
        ]
        features = [output.features for output in outputs if output.features is not None]
        logits = torch.cat([output.logits for output in outputs])
        return Outputs(logits[logit_rows], torch.cat(features) if features else None)

    def _inputs(self, parts: Sequence[NewTokens], batch: PackedBatch, *others: Any) -> Inputs:
        # Those of several devices are made and copied when a layer requests them.
        return Inputs.of(
            parts, batch, self._requested_plans if self._is_on_one_device else (), *others
        )

    def _replayable(self, pool: KVPool, inputs: Inputs) -> Any:
        """Compute a forward that reads tensors only, of inputs on the device; layers with states
        cannot.
        """
        with self.prepacked.in_use(), self.fused.in_use():  # for modules, which replays do not call
            seen = None if inputs.level is None else inputs.level.seen
            outputs = self._compute(pool, PlannedBatch(inputs.plans, seen), inputs)
            return outputs if inputs.level is None else inputs.level.outputs(outputs.logits)

    def _compute(
        self,
        pool: KVPool,
        batch: Plans,
        inputs: Inputs,
        spans: Sequence[Span] = (),
        backend: Backend | None = None,
    ) -> Outputs:
        """Run the model.

        ``spans`` are sequences whose states and encoders its layers read; none when replayed.
        ``backend``: None for the model's.
        """
        forward: PackedForward | GatheredForward | DecoderForward
        interface: PackedForward | None = None
        if any(layer.is_own for layer in self.layers):
            forward = GatheredForward(pool, batch, inputs.position_ids)
        else:
            own_spans = spans if self.has_states else ()
            kind = AloneForward if self.prefills_alone else PackedForward
            backend = backend or self.backend
            forward = interface = kind(
                pool, batch, backend, self.layers, inputs.position_ids, own_spans
            )
            if self.attends_to_encoder and spans[0].sequence.encoded is not None:
                forward = DecoderForward(forward, spans)
        tokens = inputs.tokens if inputs.level is None else inputs.level.inputs(inputs.tokens)
        arguments = (
            inputs.position_ids,
            inputs.logit_rows,
            inputs.feature_layers,
            self._keeps_logits,
        )
        with self.exact_products if self.exact else contextlib.nullcontext():
            outputs = packed_outputs(self.model, forward, tokens, *arguments)
        if interface is not None and not getattr(self.model, "caches_context", False):
            interface.check_attended()
        return outputs
