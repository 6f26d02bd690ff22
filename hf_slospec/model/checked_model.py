"""A model that has passed the trial of packed forwards, with its lock and the measured cost of its
forwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.engine.latency_curves import ForwardCost
from hf_slospec.errors import InvalidInputError
from hf_slospec.forks import cached_property
from hf_slospec.model.exact_trial import check_exact
from hf_slospec.model.linear_overrides import all_modules
from hf_slospec.model.machine import (
    log_idle_gpu,
    release_openmp_threads,
    warn_if_contended,
    warn_if_oversubscribed,
)
from hf_slospec.model.measure import Forwards, drop_profile, load_profile, measure, save_profile
from hf_slospec.model.ownership import check_activations, check_own_code
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.preparation import prepare
from hf_slospec.model.properties import (
    autocast_dtype,
    check_embeds_tokens,
    evaluating,
    input_device,
)
from hf_slospec.model.ranks import Ranks, ranks_of
from hf_slospec.model.trial import check_by_trial, counts_gaps, counts_padding, ignores_zero_types
from hf_slospec.model.version import ModelVersion
from hf_slospec.model.whose_code import changing_hooks, check_code, is_compiled, num_global_hooks

logger = logging.getLogger(__name__)

# Seconds. Maximum time of measuring again after compiled forwards have replaced eager ones.
RENEWED_S = 1.0


class CheckedModel:
    """A model that has passed the trial of packed forwards (see trial.py). The trial is repeated
    after the model was moved, cast or changed.

    Engines hold the target's ``lock`` while they use the K/V caches of the target and of its
    drafts.
    """

    def __init__(
        self, model: Any, config: SLOSpecConfig, measure_s: float, target: Ranks | None = None
    ):
        """Make the model's packed forwards and try them.

        Args:
            model: a causal LM or a drafting head.
            config: the settings.
            measure_s: maximum seconds of measuring costs, if no profile is saved.
            target: ranks of the target if the model is a draft; None if it is a target.

        Raises:
            UnsupportedModelError: the model cannot verify a token tree.
            UnsupportedOptionError: the model's weights cannot be had as ``config.weights`` asks.
            IncompatibleDraftError: the draft is split over other processes than the target.
        """
        check_embeds_tokens(model)
        self.model = model
        self.config = config
        self.measure_s = measure_s
        self._new_ranks: Callable[[Any], Ranks] = ranks_of if target is None else target.with_draft
        self.ranks = self._new_ranks(model)
        self._is_target = target is None
        self.lock = FairLock(release_openmp_threads)
        self._renewing = FairLock()  # taken after `lock` where both are held
        self.packed: PackedModel
        self._placement: tuple[Any, ...]
        self._sets_attributes = False  # the model's forward changes attributes of its modules
        self.known_cost: ForwardCost | None = None  # None: not measured, or no longer valid
        self._is_cost_compiled = False  # known_cost was measured with compiled forwards
        if self._is_target:  # a draft's tokens are only proposals, whatever code makes them
            check_own_code(model)
        is_of_target = config.weights.endswith(".gguf") and not self._is_target
        prepare(model, config.model_copy(update={"weights": "auto"}) if is_of_target else config)
        self._make(None)

    @property
    def place(self) -> tuple[Any, ...]:
        """Device, dtype and replaced forward of the model. They may not change while
        requests run.
        """
        model = self.model
        return (
            input_device(model),
            model.get_input_embeddings().weight.dtype,
            vars(model).get("forward"),
        )

    def _make(self, version: ModelVersion | None) -> None:
        """Make and try the packed forwards for the model's present device, dtype and forward."""
        if input_device(self.model).type == "cpu":
            warn_if_oversubscribed()
            log_idle_gpu()
        self._check_deciding()
        self._check_code()
        placement = self._present_placement(all_modules(self.model))
        if version is not None:  # the model was used before; refuse it if FSDP has split it since
            self._new_ranks(self.model)
            if self._placement[:-1] == placement[:-1]:  # running engines rely on the same layers
                self.packed.check_layers()
        config = self.config if self._is_target else self.config.model_copy(update={"exact": None})
        packed = PackedModel(self.model, config, self.ranks, version)
        self._try(packed)
        self.packed = packed
        self._placement = placement
        self.known_cost = None
        self._tried = self._to_try

    def _present_placement(self, parts: Sequence[Any]) -> tuple[Any, ...]:
        autocast = autocast_dtype(input_device(self.model).type)
        num_hooks = num_global_hooks() + sum(len(changing_hooks(part)) for part in parts)
        # model.to(dtype) casts them even if all weights had the dtype before
        buffers = {
            buffer.dtype
            for part in parts
            for buffer in part._buffers.values()
            if buffer is not None
        }
        return *self.place, buffers, is_compiled(self.model, parts), autocast, num_hooks

    @property
    def _to_try(self) -> int:
        """Version counter that has advanced if the model has to be tried again."""
        version = self.packed.version
        return version.structure if self._sets_attributes else version.modules

    def renew(self, lock: FairLock, is_idle: bool = True) -> None:
        """Check for changes of the model; repeat the trial if more than its weights has changed.

        Args:
            lock: the lock of the engines that use the model's cache.
            is_idle: no request runs; see :meth:`ModelVersion.renew`.

        Raises:
            UnsupportedModelError: the model's packed forwards no longer agree with its own forward,
                or it runs foreign code.
            InvalidInputError: the model has to be tried, and its processes follow a batcher.
        """
        version = self.packed.version
        version.renew(is_idle)
        parts = version.all_parts
        if self._is_target:
            check_own_code(self.model, parts)
        with self._renewing:
            if self._placement != self._present_placement(parts):
                self._make(version)
        self.packed.take_in_changes()
        if self.ranks.any(self._tried != self._to_try):  # ranks must try the model together
            with lock, self._renewing:
                # Another thread may have tried the model meanwhile.
                if self._tried != self._to_try or self.ranks.num_deciding > 1:
                    self._check_deciding()
                    self._check_code()
                    self.packed.check_layers()
                    self._try(self.packed)
                    previous = version.modules
                    self.packed.renew(is_idle=False)
                    self._sets_attributes |= previous != version.modules
                    self._tried = self._to_try

    def _check_deciding(self) -> None:
        """Raise InvalidInputError if this process cannot try the model now, as it only follows the
        first process of a tensor-parallel model.
        """
        if self._is_target and self.ranks.is_led:
            raise InvalidInputError(
                f"{type(self.model).__name__} has to be tried, as it is new or was changed, and the batcher of this "
                "tensor-parallel model uses its processes; stop() it, and start() it again in all processes"
            )

    def _check_code(self) -> None:
        """Raise UnsupportedModelError if the target's layers run code whose effect a trial cannot
        show. A draft's code is not checked.
        """
        if self._is_target:
            check_code(self.model)
            check_activations(self.model)

    def _try(self, packed: PackedModel) -> None:
        for name in ("counts_padding", "counts_gaps", "ignores_zero_types"):
            vars(self).pop(name, None)
        check_by_trial(packed)
        if packed.exact:
            check_exact(packed)

    @cached_property
    def counts_padding(self) -> bool:
        """Return whether left padding of a row changes what stock computes for it."""
        return counts_padding(self.packed)

    @cached_property
    def counts_gaps(self) -> bool:
        """Return whether masked tokens inside a prompt change what the model computes for other
        tokens.
        """
        return counts_gaps(self.packed)

    @cached_property
    def ignores_zero_types(self) -> bool:
        """Return whether passing ``token_type_ids`` of zeros has no effect on the model."""
        return ignores_zero_types(self.packed)

    @property
    def cost(self) -> ForwardCost:
        """Cost of the model's forwards, from a saved profile of this machine or, if there is none,
        measured now.
        """
        packed = self.packed
        with self.lock, self._renewing:
            seconds = self.measure_s
            if self.known_cost is not None and self._is_cost_compiled != packed.is_compiled:
                self.known_cost = None
                seconds = min(seconds, RENEWED_S)
            self._is_cost_compiled = packed.is_compiled
            if self.known_cost is None:
                # All ranks must decide alike, and some may not find the file yet.
                self.known_cost = self.ranks.first(load_profile(packed))
            if self.known_cost is None:
                name = type(self.model).__name__
                logger.info("measuring the step times of %s for about %.1f s", name, seconds)
                with evaluating(self.model):
                    self.known_cost = measure(Forwards(packed), seconds).fit()
                save_profile(packed, self.known_cost)
            return self.known_cost

    def replace_cost(self, old: ForwardCost, new: ForwardCost) -> None:
        """Replace a cost that turned out wrong by what steps measured, and delete the saved
        profile, so that the next process measures again.
        """
        with self._renewing:
            if self.known_cost is old:  # the model was not moved or measured again meanwhile
                self.known_cost = new
                drop_profile(self.packed)
                if input_device(self.model).type == "cpu":
                    warn_if_contended(new(1) / old(1))
