"""Loading of drafters: recognises what ``drafter=`` takes by its name, its type or its files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_slospec.drafters.assistant import AssistantMethod
from hf_slospec.drafters.checkpoint import LOADING_ERRORS, Checkpoint, open_checkpoint
from hf_slospec.drafters.head import Head, HeadMethod
from hf_slospec.drafters.hybrid import HybridMethod, model_before_last
from hf_slospec.drafters.lookup import LookupMethod
from hf_slospec.drafters.methods import DraftMethod
from hf_slospec.drafters.past_answers import PastAnswers
from hf_slospec.drafters.registry import (
    AssistantKind,
    drafter_names,
    entries,
    head_formats,
    head_of,
    named_drafters,
)
from hf_slospec.drafters.user import UserMethod
from hf_slospec.engine.interfaces import Drafter
from hf_slospec.errors import (
    InvalidInputError,
    InvalidTypeError,
    SLOSpecError,
    UnsupportedModelError,
)
from hf_slospec.extras import need
from hf_slospec.model.loading import (
    check_causal_lm,
    check_tokenizer,
    hub_options,
    load_model,
    loading_hint,
)
from hf_slospec.model.properties import input_device

CAUSAL_LMS = {
    name
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    for name in ([names] if isinstance(names, str) else names)
}

Source = str | os.PathLike[str] | PreTrainedModel | DraftMethod
Drafting = Drafter | Source | Sequence[Source]  # what ``drafter=`` takes
USER_METHODS = ("draft", "release")  # methods by which a user's drafter is recognised


def drafting_method(
    target: PreTrainedModel,
    assistant_model: PreTrainedModel | None,
    drafter: Drafting | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
) -> DraftMethod:
    """Return the drafting method for ``assistant_model`` or ``drafter``, of which at most one is
    given (see :func:`one_way_to_draft`); without either, prompt lookup.

    See :func:`load_drafter` for the tokenizers.

    Raises:
        InvalidInputError: no drafter has that name.
        InvalidTypeError: the argument is of no type that can draft.
        SLOSpecError: as :func:`load_drafter`.
    """
    if assistant_model is not None:
        model = check_causal_lm("assistant_model", assistant_model)
        return assistant_method(model, target, tokenizer, assistant_tokenizer)
    if drafter is None:
        return LookupMethod()
    source: Any = drafter
    if _is_users(source):
        return UserMethod(source)
    return load_drafter(
        source, target, tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer
    )


def one_way_to_draft(assistant_model: Any, drafter: Any) -> tuple[Any, Any]:
    """Return ``assistant_model`` and ``drafter``, at most one of them not None. What is given as
    assistant model and is no loaded model, such as ``"lookup"``, is returned as drafter.

    Raises:
        InvalidInputError: both are given.
    """
    if assistant_model is not None and drafter is not None:
        raise InvalidInputError(
            "assistant_model and drafter are two ways to draft; give one of them"
        )
    kinds = str, os.PathLike, list, tuple, DraftMethod
    is_drafter = isinstance(assistant_model, kinds) or _is_users(assistant_model)
    return (None, assistant_model) if is_drafter else (assistant_model, drafter)


def is_named(source: Any) -> bool:
    """Return whether a source is the name of a drafter or a sum such as ``"lookup+mtp"``."""
    is_text = isinstance(source, str) and not os.path.isdir(source)
    return is_text and ("+" in source or source in named_drafters())


def check_drafting(assistant_model: Any, drafter: Drafting | None) -> None:
    """Check what drafts before the target is loaded; raise the errors of :func:`one_way_to_draft`
    and :func:`drafting_method`.
    """
    one_way_to_draft(assistant_model, drafter)
    source: Any = drafter
    if source is not None and not _is_users(source):
        check_source(source)


def _is_users(drafter: Any) -> bool:
    """Return whether this is an object of the user with the methods of a drafter."""
    return all(callable(getattr(drafter, name, None)) for name in USER_METHODS)


def load_drafter(
    source: Source | Sequence[Source],
    target: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    share_texts: bool | PastAnswers = False,
    allow_missing: bool = False,
) -> DraftMethod:
    """Load a drafter for a target, and log its kind.

    ``drafter=`` takes the same sources. A drafter that is loaded first can have options, be
    inspected, and serve several generators.

    Args:
        source: one of

            - ``"lookup"``: prompt lookup; ``"suffix"``: suffix trees (extra ``suffix``);
            - ``"mtp"``: the multi-token prediction layer that the target was published with;
            - a folder or Hub repository of a trained head (EAGLE-3, DFlash, DSpark, MTP) or of a
              smaller causal LM, known by its config and tensors; safetensors only;
            - a loaded causal LM;
            - several of these, as a sequence or joined by ``+``, whose trees are merged:
              ``"lookup+mtp"``. Only the last one may have a model.
        target: the loaded model that verifies.
        tokenizer: the target's; with ``assistant_tokenizer``, a causal LM with another tokenizer
            can draft. Both are loaded from the models' folders or repositories if they are needed
            and not given.
        assistant_tokenizer: the causal LM's.
        share_texts: ``"lookup"`` and ``"suffix"`` also draft from other requests with the same
            ``cache_salt``; :class:`PastAnswers` sets bounds, and can be saved and loaded.
        allow_missing: accept a causal LM whose files lack tensors or have unexpected ones.

    Returns:
        The drafter, in the target's dtype and on its device.

    Raises:
        InvalidTypeError, InvalidInputError: there is no such source.
        UnsupportedModelError: the source cannot draft, or its files are pickled or incomplete.
        IncompatibleDraftError: the source was made for another target.
    """
    target = check_causal_lm("target", target)
    check_tokenizer(tokenizer)
    check_tokenizer(assistant_tokenizer, "assistant_tokenizer")
    parts = parts_of(source)
    _check_order(parts)
    if isinstance(share_texts, bool):
        past = PastAnswers() if share_texts else None
    elif isinstance(share_texts, PastAnswers):
        past = share_texts
    else:
        raise InvalidTypeError(
            f"share_texts must be True, False or PastAnswers, got {type(share_texts).__name__}"
        )
    methods = [
        _method(part, target, tokenizer, assistant_tokenizer, past, allow_missing) for part in parts
    ]
    method = methods[0] if len(methods) == 1 else HybridMethod(methods)
    method.check(target)
    return method


def parts_of(source: Source | Sequence[Source]) -> Sequence[Source]:
    """Return the parts of a source, at least one; raise InvalidTypeError if it has none."""
    parts: Any = os.fspath(source) if isinstance(source, os.PathLike) else source
    if isinstance(parts, str) and not os.path.isdir(parts):
        parts = [part.strip() for part in parts.split("+")]
    if isinstance(parts, (str, PreTrainedModel, DraftMethod)):
        parts = [parts]
    if not isinstance(parts, Sequence) or not parts:
        raise _no_source(source)
    return parts


def check_source(source: Source | Sequence[Source], further: Sequence[str] = ()) -> None:
    """Check a source before the target is loaded; read no tensor.

    Args:
        source: as for :func:`load_drafter`.
        further: more names of drafters with models, for which no files are looked up.

    Raises:
        MissingExtraError: a part needs an extra that is not installed.
        SLOSpecError: a part before the last one has a model, or the files of one cannot be found.
    """
    parts = parts_of(source)
    _check_order(parts)
    named = named_drafters()
    for part in parts:
        if isinstance(part, str) and part in named:
            if (extra := named[part].extra) is not None:
                need(extra, f"the drafter {part}")
        elif isinstance(part, str) and part not in further:
            _open(part)


def _check_order(parts: Sequence[Source]) -> None:
    """Raise InvalidInputError if a part before the last one has a model, judging by its name."""
    named = named_drafters()
    if any(
        isinstance(part, str) and (part not in named or named[part].has_model)
        for part in parts[:-1]
    ):
        raise InvalidInputError(model_before_last(" + ".join(map(str, parts))))


def _open(source: str) -> Checkpoint:
    """Return the checkpoint in a folder or Hub repository; if there is none, the error lists the
    drafters that are known by name.
    """
    if not source:
        raise _no_source(source)
    try:
        return open_checkpoint(source)
    except InvalidInputError as error:
        raise InvalidInputError(
            f"{error}; drafters known by name are {drafter_names()}, and sums such as lookup+mtp"
        ) from error


def _no_source(source: Any) -> InvalidTypeError:
    shown = (
        repr(source)
        if isinstance(source, (str, int, float, list, tuple))
        else type(source).__name__
    )
    return InvalidTypeError(
        f"a drafter must be a name ({drafter_names()}), a folder or Hub repository, a loaded model, several of "
        f"these, or an object with methods {' and '.join(map(repr, USER_METHODS))}, see hf_slospec.Drafter; got {shown}"
    )


def _method(
    source: Any,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
    past: PastAnswers | None,
    allow_missing: bool,
) -> DraftMethod:
    if isinstance(source, DraftMethod):
        return source
    if isinstance(source, Head):
        return HeadMethod(source)
    if isinstance(source, PreTrainedModel):
        return assistant_method(source, target, tokenizer, assistant_tokenizer)
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if not isinstance(source, str):
        raise _no_source(source)
    if (named := named_drafters().get(source)) is not None:
        return named.make(target, past)
    checkpoint = _open(source)
    if (head := head_of(checkpoint, target)) is not None:
        return HeadMethod(head)
    names = checkpoint.architectures
    if names and not any(name.endswith("ForCausalLM") or name in CAUSAL_LMS for name in names):
        raise UnsupportedModelError(
            f"{source} is neither a known head nor a causal LM: its class is {', '.join(names)}; these heads can be "
            f"loaded: {head_formats()}"
        )
    try:
        model: Any = load_model(
            AutoModelForCausalLM,
            source,
            allow_missing,
            dtype=target.dtype,
            use_safetensors=True,
            **hub_options(source),
        )
    except SLOSpecError:
        raise
    except LOADING_ERRORS as error:
        raise UnsupportedModelError(
            f"{source} is neither a known head nor a causal LM: {loading_hint(error)}"
        ) from error
    model = model.to(input_device(target)).eval()
    return assistant_method(model, target, tokenizer, assistant_tokenizer or source)


def assistant_method(
    model: Any,
    target: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | str | None = None,
) -> DraftMethod:
    """Return the drafting method of an assistant model.

    ``assistant_tokenizer`` may be the name of a folder or repository, which need not contain one.
    """
    for kind in entries(AssistantKind):
        method = kind.make(model, target, tokenizer, assistant_tokenizer)
        if method is not None:
            return method
    return AssistantMethod(model)
