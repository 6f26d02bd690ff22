"""Drafting methods, each of which makes a drafter for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_slospec.algo.latency import ForwardCost
from hf_slospec.drafters.assistant import AssistantDrafter
from hf_slospec.drafters.block import BlockDrafter
from hf_slospec.drafters.checked import CheckedDrafter
from hf_slospec.drafters.head import HeadDrafter
from hf_slospec.drafters.heads.dflash import DFlashHead
from hf_slospec.drafters.heads.head import DraftHead
from hf_slospec.drafters.hybrid import HybridDrafter
from hf_slospec.drafters.prompt_lookup import MAX_NGRAM, PromptLookupDrafter
from hf_slospec.drafters.shared_kv import LAST_HIDDEN, LevelTimer, SharedKVDrafter, cached_layers
from hf_slospec.drafters.suffix import SuffixDrafter
from hf_slospec.drafters.translation import TokenTranslation
from hf_slospec.engine.protocols import Drafter
from hf_slospec.errors import IncompatibleDraftError, InvalidInputError
from hf_slospec.models.costs.measure import measure_by
from hf_slospec.models.inspection.properties import evaluating, input_device, vocab_size
from hf_slospec.models.packed.model import PackedModel

PADDING = 1024  # ids by which vocabulary sizes of one tokenizer may differ, as embedding tables are padded

GEMMA4_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # values of model_type


class Room(NamedTuple):
    """Limits of one engine's drafter."""

    max_nodes: int  # tree nodes of one request per step
    vocab_size: int  # the target's
    max_slots: int | None = None  # K/V slots of all requests and kept prefixes; None: no limit
    max_kept: float = 0  # tokens of kept prefixes
    keeps_rng: bool = True  # drafting must restore the global generator, as the target samples from it


class DraftMethod:
    """A drafting method for one target, as :func:`load_drafter` returns.

    It is passed as ``drafter=``, and may serve several engines at once.
    """

    @property
    def kind(self) -> str:
        """Name of the method."""
        raise NotImplementedError

    @property
    def model(self) -> Any | None:
        """The network that drafts by packed forwards; None: there is none."""
        return None

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that it reads, numbered as in ``output_hidden_states``."""
        return ()

    def check(self, target: Any) -> None:
        """Raise IncompatibleDraftError unless it can draft for this target on its present device, in its dtype."""

    def measure_level(self, target: PackedModel, limit_s: float) -> ForwardCost | None:
        """Measure one level of drafting that ``model`` does not run; None if a level costs next to nothing.

        The caller must hold the target's lock.
        """
        return None

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        """Return a drafter for one engine; ``draft`` has the packed forwards of ``model``."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<hf_slospec drafter: {self.kind}>"


@dataclass(frozen=True, repr=False)
class AssistantMethod(DraftMethod):
    """A smaller causal LM, with the target's tokenizer or with a translation to it."""

    assistant: Any
    translation: TokenTranslation | None = None

    @property
    def kind(self) -> str:
        return "assistant model" if self.translation is None else "assistant model with another tokenizer"

    @property
    def model(self) -> Any:
        return self.assistant

    def check(self, target: Any) -> None:
        if self.translation is None:
            _check_vocabulary(self.assistant, target)
        _check_device(self.assistant, target)

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        assert draft is not None
        return AssistantDrafter(draft, room.max_nodes, room.vocab_size, room.max_slots, room.max_kept, self.translation)


@dataclass(frozen=True, repr=False)
class Gemma4Method(DraftMethod):
    """A Gemma 4 assistant, which reads the target's K/V and its last hidden state and caches nothing."""

    assistant: Any

    @property
    def kind(self) -> str:
        return "Gemma 4 assistant"

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return (LAST_HIDDEN,)

    def check(self, target: Any) -> None:
        _check_vocabulary(self.assistant, target)
        _check_device(self.assistant, target)
        hidden, expected = target.config.get_text_config().hidden_size, self.assistant.backbone_hidden_size
        if hidden != expected:
            raise IncompatibleDraftError(
                f"assistant_model reads hidden states of size {expected} and the target has {hidden}; use the "
                "assistant that was trained with this target"
            )
        ours, dtype = self.assistant.lm_head.weight.dtype, target.get_input_embeddings().weight.dtype
        if ours != dtype:
            raise IncompatibleDraftError(
                f"assistant_model is in {ours} and the target in {dtype}; cast it with assistant_model.to({dtype})"
            )
        self._check_layers(target)

    def _check_layers(self, target: Any) -> None:
        """Raise IncompatibleDraftError unless the target caches K/V for every layer of the assistant."""
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
            return measure_by(LevelTimer(self.assistant, target), limit_s).fit()

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        return SharedKVDrafter(self.assistant, room.vocab_size)


def _check_vocabulary(assistant: Any, target: Any) -> None:
    """Raise IncompatibleDraftError if the vocabularies differ by more than padding."""
    smaller, larger = sorted((vocab_size(target), vocab_size(assistant)))
    if larger - smaller > min(PADDING, smaller / 2):
        raise IncompatibleDraftError(
            f"assistant_model has a vocabulary of {vocab_size(assistant)} tokens and the target one of "
            f"{vocab_size(target)}, which differ by more than padding; use a draft that was trained with the target's "
            "tokenizer, or give both tokenizers: drafter=hf_slospec.load_drafter(assistant_model, target, "
            "tokenizer=..., assistant_tokenizer=...)"
        )


def _check_device(assistant: Any, target: Any) -> None:
    """Raise IncompatibleDraftError if the models are on different devices."""
    if input_device(target) != input_device(assistant):
        raise IncompatibleDraftError(
            f"assistant_model is on {input_device(assistant)} and the target on {input_device(target)}; "
            f"move it there with assistant_model.to('{input_device(target)}')"
        )


def _kv_shape(attention: Any) -> tuple[int, int]:
    """Return the number and the size of a layer's K/V heads."""
    return attention.config.num_attention_heads // attention.num_key_value_groups, attention.head_dim


@dataclass(frozen=True, repr=False)
class HeadMethod(DraftMethod):
    """A trained head that reads hidden states of the target: EAGLE-3, MTP or DFlash."""

    head: DraftHead | DFlashHead

    @property
    def kind(self) -> str:
        return self.head.kind

    @property
    def model(self) -> Any:
        return self.head

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.head.feature_layers

    def check(self, target: Any) -> None:
        config, here = target.config.get_text_config(decoder=True), next(target.parameters())
        sizes = self.head.config.vocab_size, self.head.target_hidden_size
        targets = vocab_size(target), config.hidden_size
        if sizes != targets:
            raise IncompatibleDraftError(
                f"the {self.kind} is for a target with a vocabulary of {sizes[0]} tokens and a hidden size of "
                f"{sizes[1]}; this one has {targets[0]} and {targets[1]}; use a head that was trained with this target"
            )
        for parameter in self.head.parameters():  # all of them, as some are the target's
            if (parameter.device, parameter.dtype) != (here.device, here.dtype):
                raise IncompatibleDraftError(
                    f"the {self.kind} is in {parameter.dtype} on {parameter.device} and the target in {here.dtype} on "
                    f"{here.device}; load it again after the target was moved or cast"
                )

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        assert draft is not None
        make = BlockDrafter if isinstance(self.head, DFlashHead) else HeadDrafter
        return make(draft, room.max_nodes, room.vocab_size, room.max_slots, room.max_kept)


@dataclass(frozen=True, repr=False)
class LookupMethod(DraftMethod):
    """Prompt lookup."""

    max_ngram: int = MAX_NGRAM
    max_depth: int | None = None

    @property
    def kind(self) -> str:
        return "prompt lookup"

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        return PromptLookupDrafter(self.max_ngram, self.max_depth)


class SuffixMethod(DraftMethod):
    """Suffix trees of the request's tokens and, if that is allowed, of other requests' outputs."""

    @property
    def kind(self) -> str:
        return "suffix trees"

    def __init__(self, shares_texts: bool = False):
        """Make the trees, which all engines share; see :class:`SuffixDrafter`."""
        self._drafter = SuffixDrafter(shares_texts=shares_texts)

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        return self._drafter


def model_before_last(kind: str) -> str:
    """Return the error message for a hybrid with a model before its last part."""
    return (
        f"the drafter {kind} has a model before its last part; at most one part may have a model, and it is written "
        "last, as in 'lookup+org/draft'"
    )


@dataclass(frozen=True, repr=False)
class HybridMethod(DraftMethod):
    """Several methods, whose candidate trees are merged: cheap ones first; only the last may have a model."""

    methods: Sequence[DraftMethod]

    def __post_init__(self) -> None:
        if any(method.model is not None or method.feature_layers for method in self.methods[:-1]):
            raise InvalidInputError(model_before_last(self.kind))

    @property
    def kind(self) -> str:
        return " + ".join(method.kind for method in self.methods)

    @property
    def model(self) -> Any | None:
        return self.methods[-1].model

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.methods[-1].feature_layers

    def check(self, target: Any) -> None:
        for method in self.methods:
            method.check(target)

    def measure_level(self, target: PackedModel, limit_s: float) -> ForwardCost | None:
        return self.methods[-1].measure_level(target, limit_s)

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        return HybridDrafter([method.new_drafter(draft, room) for method in self.methods])


@dataclass(frozen=True, repr=False)
class UserMethod(DraftMethod):
    """A drafter that the user wrote."""

    drafter: Drafter

    @property
    def kind(self) -> str:
        return "drafter of your own"

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(getattr(self.drafter, "feature_layers", ()))  # the object need not be a Drafter

    def new_drafter(self, draft: PackedModel | None, room: Room) -> Drafter:
        return CheckedDrafter(self.drafter, room.vocab_size, room.keeps_rng)


def assistant_method(model: Any) -> DraftMethod:
    """Return the drafting method of an assistant model."""
    return Gemma4Method(model) if model.config.model_type in GEMMA4_ASSISTANTS else AssistantMethod(model)
