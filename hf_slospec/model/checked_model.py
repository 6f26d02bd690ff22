"""A model that passed the trial of packed forwards, with its lock and the cost of its forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.fair_lock import FairLock
from hf_slospec.engine.latency_curves import ForwardCost
from hf_slospec.errors import InvalidInputError
from hf_slospec.families.ranks import Ranks
from hf_slospec.forks import cached_property
from hf_slospec.model.exact_trial import check_exact
from hf_slospec.model.machine import (
    log_idle_gpu,
    release_openmp_threads,
    warn_if_contended,
    warn_if_oversubscribed,
)
from hf_slospec.model.measure import drop_profile, load_profile, measure, save_profile
from hf_slospec.model.overrides import all_modules
from hf_slospec.model.ownership import check_activations, check_own_code
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import (
    autocast_dtype,
    check_embeds_tokens,
    evaluating,
    input_device,
)
from hf_slospec.model.trial import check_by_trial, counts_gaps, counts_padding, ignores_zero_types
from hf_slospec.model.whose_code import changing_hooks, check_code, is_compiled, num_global_hooks

RENEWED_S = (
    1.0  # seconds of measuring between two calls, once compiled forwards have replaced eager ones
)


class CheckedModel:
    """A model that passed the trial of packed forwards, which is repeated after it was moved, cast
    or changed.

    Engines hold the target's ``lock`` while they use the K/V caches of the target and of its
    drafts."""

    def __init__(
        self, model: Any, config: SLOSpecConfig, measure_s: float, target: Ranks | None = None
    ):
        """Check the model.

        Args:
            model: a causal LM or a drafting head.
            config: the settings.
            measure_s: maximum seconds of measuring, if no profile is saved.
            target: ranks of the target, if the model is a draft; None: it is a target.

        Raises:
            UnsupportedModelError: the model cannot verify a token tree.
            IncompatibleDraftError: it is split over other processes than the target.
        """
        check_embeds_tokens(model)
        self.model = model
        self.config = config
        self.measure_s = measure_s
        self._new_ranks: Callable[[Any], Ranks] = Ranks if target is None else target.with_draft
        self.ranks = self._new_ranks(model)
        self._is_target = target is None
        self.lock = FairLock(release_openmp_threads)
        self._renewing = FairLock()  # taken after `lock` where both are held
        self._placement: tuple[Any, ...] | None = None
        self._tried = self._seen = (
            0  # states of the fingerprint at the last trial, and at the last renewal
        )
        self._sets_attributes = False  # its own forwards change attributes of its modules
        self._packed: PackedModel
        self._cost: ForwardCost | None = None
        self._is_cost_compiled = False  # the cost is that of compiled forwards
        if self._is_target:  # a draft decides no token
            check_own_code(model)
        _ = self.packed

    @property
    def place(self) -> tuple[Any, ...]:
        """Device, dtype and replaced forward of the model; they may not change while requests run."""
        model = self.model
        return (
            input_device(model),
            model.get_input_embeddings().weight.dtype,
            vars(model).get("forward"),
        )

    @property
    def packed(self) -> PackedModel:
        """The packed forwards for the model's present device and dtype."""
        hooks = num_global_hooks() + sum(
            len(changing_hooks(module)) for module in all_modules(self.model)
        )
        autocast = autocast_dtype(input_device(self.model).type)
        placement = *self.place, is_compiled(self.model), autocast, hooks
        with self._renewing:
            if placement != self._placement:
                if input_device(self.model).type == "cpu":
                    warn_if_oversubscribed()
                    log_idle_gpu()
                self._check_deciding()
                self._check_code()
                if self._placement is not None:  # FSDP may have split it since
                    self._new_ranks(self.model)
                    if (
                        self._placement[:-1] == placement[:-1]
                    ):  # engines go on with the old one beside new hooks
                        self._packed.check_layers()
                    self._packed.fingerprint.renew(is_idle=False)
                config = (
                    self.config
                    if self._is_target
                    else self.config.model_copy(update={"exact": None})
                )
                packed = PackedModel(self.model, config, self.ranks)
                self._try(packed)
                if (
                    self._placement is not None
                ):  # engines that still use the old one must notice changes, too
                    packed.fingerprint = self._packed.fingerprint
                self._packed = packed
                self._placement = placement
                self._cost = None
                self._tried = self._to_try
            return self._packed

    @property
    def _to_try(self) -> int:
        """The state of the model that needs a trial."""
        fingerprint = self._packed.fingerprint
        return fingerprint.structure_state if self._sets_attributes else fingerprint.modules_state

    def renew(self, lock: FairLock, is_idle: bool = True) -> bool:
        """Take in changes of the model, and repeat the trial if they were of more than its weights.

        Args:
            lock: the lock of the engines that use the model's cache.
            is_idle: no request runs; see :meth:`Fingerprint.renew`.

        Returns:
            Whether something has changed.

        Raises:
            UnsupportedModelError: its packed forwards are no longer those of the model, or it runs
                foreign code.
            InvalidInputError: it has to be tried, and its processes follow a batcher.
        """
        if self._is_target:
            check_own_code(self.model)
        self.packed.renew(is_idle)
        if self.ranks.any(self._tried != self._to_try):  # all ranks try the model, or none
            with lock, self._renewing:
                packed = self.packed
                if (
                    self._tried != self._to_try or self.ranks.num_deciding > 1
                ):  # no other thread was faster
                    self._check_deciding()
                    self._check_code()
                    packed.check_layers()
                    self._try(packed)
                    before = packed.fingerprint.modules_state
                    packed.renew(is_idle=False)
                    self._sets_attributes |= before != packed.fingerprint.modules_state
                    self._tried = self._to_try
        before = self._seen
        self._seen = self._packed.fingerprint.state
        return before != self._seen

    def _check_deciding(self) -> None:
        """Raise InvalidInputError if this process cannot forward the model by itself, to try it."""
        if self._is_target and self.ranks.is_led:
            raise InvalidInputError(
                f"{type(self.model).__name__} has to be tried, as it is new or was changed, and the batcher of this "
                "tensor-parallel model uses its processes; stop() it, and start() it again in all processes"
            )

    def _check_code(self) -> None:
        """Raise UnsupportedModelError if a trial cannot tell what the target's layers do; drafts
        may do anything.
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
        """Return whether a row of stock's batches depends on its padding."""
        return counts_padding(self.packed)

    @cached_property
    def counts_gaps(self) -> bool:
        """Return whether masked tokens inside a prompt change what the model computes, by their
        places.
        """
        return counts_gaps(self.packed)

    @cached_property
    def ignores_zero_types(self) -> bool:
        """Return whether ``token_type_ids`` of zeros change nothing of what the model computes
        without any.
        """
        return ignores_zero_types(self.packed)

    @property
    def cost(self) -> ForwardCost:
        """Cost of the forwards: from a saved profile of this machine, or else measured now."""
        packed = self.packed
        with self.lock, self._renewing:
            seconds = self.measure_s
            if self._cost is not None and self._is_cost_compiled != packed.compiled.is_used:
                self._cost = None
                seconds = min(seconds, RENEWED_S)
            self._is_cost_compiled = packed.compiled.is_used
            if self._cost is None:
                self._cost = self.ranks.first(
                    load_profile(packed)
                )  # other ranks may not find the file yet
            if self._cost is None:
                with evaluating(self.model):
                    self._cost = measure(packed, seconds).fit()
                save_profile(packed, self._cost)
            return self._cost

    @property
    def known_cost(self) -> ForwardCost | None:
        """Cost of the forwards as far as it is known; None before the first use of :attr:`cost`."""
        return self._cost

    def take_cost(self, cost: ForwardCost | None) -> None:
        """Use the cost that another process has learned."""
        self._cost = cost

    def replace_cost(self, old: ForwardCost, new: ForwardCost) -> None:
        """Replace a profile that turned out wrong by what steps measured; the next process measures
        again.
        """
        with self._renewing:
            if self._cost is old:  # otherwise the model was moved or measured since
                self._cost = new
                drop_profile(self._packed)
                if input_device(self.model).type == "cpu":
                    warn_if_contended(new.at(1) / old.at(1))
