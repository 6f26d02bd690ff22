"""Packed forwards of a causal LM: the new tokens of several sequences are one batch of one row."""

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
from hf_slospec.model.linear_overrides import OverrideOptions, Overrides
from hf_slospec.model.paths import Facts, PathContext, make_paths, resolve_paths
from hf_slospec.model.probe import refuse_by_declaration
from hf_slospec.model.properties import (
    converts_weights,
    input_device,
    num_embeddings,
    vocab_size,
    watching_autocast,
)
from hf_slospec.model.ranks import Ranks, ranks_of
from hf_slospec.model.version import ModelVersion

EAGER = SLOSpecConfig(compile=False)


class PackedModel:
    """Packed forwards of a model, and the K/V cache they use. All calls require the model's
    lock.
    """

    def __init__(
        self,
        model: Any,
        config: SLOSpecConfig = EAGER,
        ranks: Ranks | None = None,
        version: ModelVersion | None = None,
    ):
        """Probe a model's layers, and choose the forward paths and the attention backend.

        Args:
            model: a causal LM.
            config: the settings.
            ranks: processes that run the model; None: found from how the model is split.
            version: the model's version counters, if other objects use them too; None: new ones.

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
            self.autocast = autocast_of()  # dtype, if the model's forward enables autocast
        self.version = version or ModelVersion(model)
        # Versions of weights and modules that overrides and paths were made from.
        self._weights_version = self.version.weights
        self._modules_version = self.version.modules
        self.rope = LengthRope(model)
        # The backend of exact forwards is chosen after resolve_paths, which may refuse them.
        backend = None if config.exact else backend_for(config.attention, self.layers)
        is_exact_on_cuda = config.exact is not None and self.device.type == "cuda"
        facts = Facts.of(
            model,
            self.layers,
            num_ranks=self.ranks.number,
            has_states=self.family.has_states,
            attends_to_encoder=self.family.attends_to_encoder,
            varies_rope=self.rope.max_plain is not None,
            autocast=self.autocast if converts_weights(model, self.autocast) else None,
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
        self._tried = self.paths  # paths that a forward tries, in this order
        if self.exact and self.is_compiled:  # bits agree only if one path computes all forwards
            self._tried = [self.path("compiled")]
            self.eager = EagerPath(context, self.backend)  # isolates tokens with NaN
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
        """Read the vocabulary size and the maximum position once, as reading the config is slow."""
        config = self.model.config.get_text_config()
        self.vocab_size = max(vocab_size(self.model), num_embeddings(self.model))
        names = ("max_position_embeddings", "max_target_positions")
        lengths = (getattr(config, name) for name in names if hasattr(config, name))
        is_rotary = getattr(config, "rope_parameters", None) is not None
        # Rows of the learned position embedding; None if the model has none.
        self.max_positions: int | None = None if is_rotary else next(lengths, None)

    def renew(self, is_idle: bool = True) -> bool:
        """Check for changes of the model's weights and modules, and update what was made from them.

        Args:
            is_idle: see :meth:`ModelVersion.renew`.

        Returns:
            Whether the model has changed.
        """
        has_changed = self.version.renew(is_idle)
        self.take_in_changes()
        return has_changed

    def take_in_changes(self) -> None:
        """Update overrides and paths if the version counters have advanced."""
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
        """Probe the layers again; raise UnsupportedModelError if their number, masks or rotary
        embeddings have changed.
        """
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
        """Return which path computes forwards that return the hidden states after
        ``feature_layers``: "compiled", "cuda_graphs", or "eager" and the reason.
        """
        if len(self.paths) > 1:
            return self.paths[0].status(feature_layers)
        wanted = "cuda_graphs" if self.device.type == "cuda" else "compiled"
        return f"eager: {self._resolution.why_not.get(wanted, 'nothing compiles forwards')}"

    @property
    def prefills_alone(self) -> bool:
        """Return whether each prompt has to be prefilled as a whole and in a separate forward, as
        stock does.
        """
        return self.eager.prefills_alone

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V per token, over all layers."""
        return sum(stored.num_bytes for layer in self.layers for stored in layer.shape.stored)

    @property
    def num_selected(self) -> int | None:
        """Number of keys that the layers' indexers (sparse attention) select per token; None
        without indexers.
        """
        if all(layer.shape.index_key is None for layer in self.layers):
            return None
        return int(self.model.config.get_text_config().index_topk)

    def clamp_positions(self, positions: np.ndarray) -> np.ndarray:
        """Clamp positions to the learned position embedding; draft nodes beyond it are never
        committed.
        """
        limit = self.max_positions
        return positions if limit is None else np.minimum(positions, limit - 1)

    def clamp_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """Clamp token ids to this model's embedding table; a draft's may be smaller than the
        target's.
        """
        clamped: np.ndarray = np.minimum(tokens, self.vocab_size - 1)
        return clamped

    @property
    def kv_cache(self) -> KVCache:
        """The K/V cache that all callers share; the last reference to it frees it."""
        return self._cache.get()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the model's K/V pool, in use or kept idle for CUDA graphs."""
        return self._cache.num_bytes

    def keep_if_captured(self, cache: KVCache) -> None:
        """Keep the pool of a cache that a caller stops using if it is small and CUDA graphs need
        it.
        """
        self._cache.keep_if_used(cache)

    @property
    def num_one_off_forwards(self) -> int:
        """Number of forwards so far with one-off costs, such as the capture of a CUDA graph."""
        return sum(path.num_one_off_forwards for path in self.paths)

    def forward(
        self, pool: KVPool, parts: Sequence[NewTokens], logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Stage the K/V of new tokens, and return logits as :meth:`outputs` does.  -> [num_logits,
        vocab], in the model's dtype
        """
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
        """Stage the K/V of new tokens; return the logits of some of them and hidden states of all.

        Args:
            pool: storage of the parts' sequences.
            parts: new tokens, one part per sequence; they form the packed batch in this order.
            logit_rows: [num_logits] int64, indices in the packed batch of tokens whose logits are
                returned.
            feature_layers: indices of the hidden states to return, as in ``output_hidden_states``.
            level: see :meth:`draft`.
        """
        if self.version.is_behind:
            self.renew()
        elif level is None or level.is_root:  # a draft tree's later levels follow without a pause
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
        """Stage the K/V of one level of draft nodes, or of the tokens up to and including the
        roots.

        Arguments are as in :meth:`outputs`. Token ids and masks of ``parts`` may be indices into
        tensors of ``level``; row 0 of ``logit_rows`` is repeated for the level's padding rows.

        Returns:
            ``level.outputs`` of the logits. The next forward of the model may overwrite its
                tensors.
        """
        if level.num_logits > len(logit_rows):
            logit_rows = F.pad(logit_rows, (0, level.num_logits - len(logit_rows)))
        outputs = self.outputs(pool, parts, logit_rows, (), level)
        if outputs.drafted is not None:
            return outputs.drafted
        with self.eager.in_force():
            return level.outputs(outputs.logits)

    def num_draft_rows(self, num_requests: int) -> int | None:
        """Return the number of rows, padding included, that a draft level of this many requests
        must have; None: it may have any number.
        """
        rows = (path.num_draft_rows(num_requests) for path in self.paths)
        return max(filter(None, rows), default=None)
