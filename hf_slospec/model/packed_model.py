"""Packed forwards of a causal LM: new tokens of several sequences as one batch of one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hf_slospec.config import SLOSpecConfig
from hf_slospec.errors import UnsupportedModelError, UnsupportedOptionError
from hf_slospec.model.attention.backends import KernelAttention, backend_for, why_no_triton
from hf_slospec.model.attention.hook import forget_attributes
from hf_slospec.model.batch import NewTokens
from hf_slospec.model.eager import EagerPath, ExactPath
from hf_slospec.model.family import probe_layers
from hf_slospec.model.inputs import DraftLevel, ForwardInputs, Outputs
from hf_slospec.model.kv_cache import KVCache, KVPool, SharedCache
from hf_slospec.model.length_rope import LengthRope
from hf_slospec.model.overrides import OverrideOptions, Overrides
from hf_slospec.model.paths import Facts, PathContext, make_paths, resolve_paths
from hf_slospec.model.probe import refuse_by_declaration
from hf_slospec.model.properties import (
    input_device,
    num_embeddings,
    vocab_size,
    watching_autocast,
)
from hf_slospec.model.ranks import Ranks, ranks_of
from hf_slospec.model.version import ModelVersion

EAGER = SLOSpecConfig(compile=False)


class PackedModel:
    """Packed forwards of a model, and their K/V cache; all uses require the model's lock."""

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
            config: the settings.
            ranks: processes that run the model; None: those over which it is split.
            version: that of the model, if it has other users.

        Raises:
            UnsupportedModelError: the model cannot be packed.
            UnsupportedOptionError: see :func:`resolve_paths`.
        """
        self.model = model
        self.ranks = ranks or ranks_of(model)
        self.device = input_device(model)  # input tokens are on it
        self.exact = config.exact
        refuse_by_declaration(model)
        with watching_autocast(model) as autocast_of:
            self.family, self.layers = probe_layers(model)
            self.autocast = autocast_of()  # dtype of its products; None: it enables no autocast
        self.version = version or ModelVersion(model)
        # What was made of the model is of these versions.
        self._weights_version = self.version.weights
        self._modules_version = self.version.modules
        self.rope = LengthRope(model)
        # That of exact forwards is chosen once they are known to be possible.
        backend = None if config.exact else backend_for(config.attention, self.layers)
        is_exact_on_cuda = config.exact is not None and self.device.type == "cuda"
        facts = Facts.of(
            model,
            self.layers,
            num_ranks=self.ranks.number,
            has_states=self.family.has_states,
            attends_to_encoder=self.family.attends_to_encoder,
            varies_rope=self.rope.max_plain is not None,
            autocast=self.autocast,
            no_kernel=why_no_triton(self.layers) if is_exact_on_cuda else None,
            has_static_attention=isinstance(backend, KernelAttention),
        )
        self._resolution = resolve_paths(config, facts)
        in_force = self._resolution.config
        self.backend = backend or backend_for(config.attention, self.layers, facts.is_on_cuda)
        context = PathContext(
            model, self.version, facts, in_force, self.family, self.layers, self.rope
        )
        self.eager = (ExactPath if self.exact else EagerPath)(context, self.backend)
        self.paths = make_paths(self._resolution, context, self.eager)
        self._tried = self.paths
        if self.exact and self.is_compiled:  # all exact forwards are computed by one path
            self._tried = [self.path("compiled")]
            self.eager = EagerPath(context, self.backend)  # for tokens with NaN
        elif self.exact:
            self._tried = [self.eager]
        options = OverrideOptions(
            self.device.type, in_force.prepack, in_force.fused_layers, self.exact, self.autocast
        )
        self.overrides = Overrides.of(model, options, not self.is_compiled)
        self.eager.in_force = self.overrides.in_force
        self._cache = SharedCache([layer.shape for layer in self.layers], self.paths)
        self._read_sizes()
        self.overrides.renew(self.version)

    def _read_sizes(self) -> None:
        """Read sizes that every part of a batch needs; the config is slow to read."""
        config = self.model.config.get_text_config()
        self.vocab_size = max(vocab_size(self.model), num_embeddings(self.model))
        names = ("max_position_embeddings", "max_target_positions")
        lengths = (getattr(config, name) for name in names if hasattr(config, name))
        is_rotary = getattr(config, "rope_parameters", None) is not None
        # Number of entries of the learned position table; None if the model has none.
        self.max_positions: int | None = None if is_rotary else next(lengths, None)

    def renew(self, is_idle: bool = True) -> bool:
        """Take in changes of weights and modules; see :meth:`ModelVersion.renew`."""
        has_changed = self.version.renew(is_idle)
        self.take_in_changes()
        return has_changed

    def take_in_changes(self) -> None:
        """Update what was made of weights and modules, also if another user has renewed the version."""
        if self._weights_version != self.version.weights:
            self._weights_version = self.version.weights
            if self._modules_version != self.version.modules:
                self._modules_version = self.version.modules
                forget_attributes(self.model)
            self._read_sizes()  # embeddings may have been resized
            self.overrides.renew(self.version)
            for path in self.paths:
                path.renew(self.version)

    def check_layers(self) -> None:
        """Raise UnsupportedModelError if the layers attend otherwise than when they were probed."""
        refuse_by_declaration(self.model)
        rope = LengthRope(self.model)
        layers = probe_layers(self.model)
        has_same_rope = (rope.max_plain, rope.modules) == (self.rope.max_plain, self.rope.modules)
        if layers != (self.family, self.layers) or not has_same_rope:
            name = type(self.model).__name__
            raise UnsupportedModelError(
                f"the attention layers of {name} have changed: their number, or window, type or "
                "rotary embedding; undo the change, call disable and enable, or make a new generator"
            )

    def path(self, name: str) -> Any:
        """Return the forward path of this name; None if the model does not use it."""
        return next((path for path in self.paths if path.name == name), None)

    @property
    def is_compiled(self) -> bool:
        """Return whether compiled forwards are ready."""
        path = self.path("compiled")
        return path is not None and path.is_ready

    def status(self, feature_layers: tuple[int, ...] = ()) -> str:
        """Return the path of forwards with these hidden states: "compiled", or "eager" with why."""
        if (path := self.path("compiled")) is not None:
            return str(path.status(feature_layers))
        return f"eager: {self._resolution.why_not.get('compiled', 'nothing compiles forwards')}"

    @property
    def prefills_alone(self) -> bool:
        """Return whether prompts have to be processed as stock does, each as a whole and alone."""
        return self.eager.prefills_alone

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V per token, over all layers."""
        return sum(stored.num_bytes for layer in self.layers for stored in layer.shape.stored)

    @property
    def num_selected(self) -> int | None:
        """Number of keys that the layers' indexers select for a token; None without indexers."""
        if all(layer.shape.index_key is None for layer in self.layers):
            return None
        return int(self.model.config.get_text_config().index_topk)

    def clamp_positions(self, positions: np.ndarray) -> np.ndarray:
        """Clamp positions to the learned position table; tokens beyond it are never committed."""
        limit = self.max_positions
        return positions if limit is None else np.minimum(positions, limit - 1)

    def clamp_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """Clamp ids to the embedding table, which may be smaller than the target's."""
        clamped: np.ndarray = np.minimum(tokens, self.vocab_size - 1)
        return clamped

    @property
    def kv_cache(self) -> KVCache:
        """The cache that all users of the model share; the last reference to it frees it."""
        return self._cache.get()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the model's K/V storage, in use or kept for graphs."""
        return self._cache.num_bytes

    def keep_if_captured(self, cache: KVCache) -> None:
        """Keep the pool of a cache that may become idle, if graphs use it and it is small."""
        self._cache.keep_if_used(cache)

    @property
    def num_one_off_forwards(self) -> int:
        """Number of forwards that took longer than later ones of their size will."""
        return sum(path.num_one_off_forwards for path in self.paths)

    def forward(
        self, pool: KVPool, parts: Sequence[NewTokens], logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of :meth:`outputs`.  -> [num_logits, vocab], in the model's dtype"""
        return self.outputs(pool, parts, logit_rows).logits

    @torch.no_grad()
    def outputs(
        self,
        pool: KVPool,
        parts: Sequence[NewTokens],
        logit_rows: torch.Tensor,
        feature_layers: tuple[int, ...] = (),
        level: DraftLevel | None = None,
    ) -> Outputs:
        """Stage the K/V of new tokens; return logits of some of them, and hidden states of all.

        Args:
            pool: storage of the parts' sequences.
            parts: one per sequence; their tokens form the packed batch in this order.
            logit_rows: [num_logits] int64, tokens of the packed batch whose logits to return.
            feature_layers: hidden states to return, as in ``output_hidden_states``.
            level: see :meth:`draft`.
        """
        if self.version.is_behind:
            self.renew()
        elif level is None or level.is_root:  # a beam's other levels follow at once
            self.version.notice_writes()
        self.take_in_changes()
        self.overrides.need(not self.is_compiled)
        inputs = ForwardInputs(pool, parts, logit_rows, feature_layers, level)
        outputs = None
        for path in self._tried:
            if (outputs := path.run(inputs)) is not None:
                break
        if outputs is None:
            raise UnsupportedOptionError(
                f'exact="{self.exact}" is a matter of compiled forwards, which cannot compute this '
                f"one: {self.status(feature_layers)}; call disable and enable again"
            )
        if level is None and self.eager.may_have_spread(outputs.logits):
            return self.eager.isolated(inputs)
        return outputs

    @torch.no_grad()
    def draft(
        self, pool: KVPool, parts: Sequence[NewTokens], logit_rows: torch.Tensor, level: DraftLevel
    ) -> Any:
        """Stage the K/V of draft nodes, or of the tokens up to their roots; return
        ``level.outputs``, which may be overwritten from the model's next forward on.

        Arguments are those of :meth:`outputs`. Ids and masks of ``parts`` may be indices into
        tensors of ``level``, and row 0 of ``logit_rows`` stands for the level's rows of padding.
        """
        if level.num_logits > len(logit_rows):
            logit_rows = F.pad(logit_rows, (0, level.num_logits - len(logit_rows)))
        outputs = self.outputs(pool, parts, logit_rows, (), level)
        if outputs.drafted is not None:
            return outputs.drafted
        with self.eager.in_force():
            return level.outputs(outputs.logits)

    def num_draft_rows(self, num_requests: int) -> int | None:
        """Return the rows, padding included, of a level of this many requests; None: any number."""
        rows = (path.num_draft_rows(num_requests) for path in self.paths)
        return max(filter(None, rows), default=None)
