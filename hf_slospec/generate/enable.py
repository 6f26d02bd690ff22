"""``enable``, after which ``model.generate(..., slo_tpot=...)`` decodes by tree speculation. Calls
are prepared in ``generate/prepare.py`` and decoded in ``generate/call.py``.

Stock ``generate`` prepares inputs, lengths, logits processors and stopping criteria, so all of its
arguments keep their meaning.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import types
import warnings
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_slospec.config import NewPolicy, SLOSpecConfig
from hf_slospec.drafters.load_drafter import Drafting
from hf_slospec.errors import FallbackWarning, InvalidInputError, UnsupportedOptionError
from hf_slospec.generate.arguments import check_flag, configured
from hf_slospec.generate.call import Decoder
from hf_slospec.model.loading import check_causal_lm
from hf_slospec.model.machine import size_and_place
from hf_slospec.request.slo import SLOTpot

logger = logging.getLogger(__name__)

# Names of stock generate's first parameters, for classes whose own generate takes *args.
POSITIONAL = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
)
# Arguments of generate that only an enabled model has.
OURS = ("slo_tpot", "fallback", "drafter")
# Attributes that enable() sets on a model.
ATTRIBUTES = ("generate", "generate_batch")
VALIDATE = "_validate_model_kwargs"  # method of a model that disable() replaces


def enable(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | Drafting | None = None,
    *,
    drafter: Drafting | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    config: SLOSpecConfig | None = None,
    make_policy: NewPolicy | None = None,
    always: bool = False,
    fallback: bool = False,
) -> PreTrainedModel:
    """Let ``model.generate`` accept ``slo_tpot``, and decode such calls by tree speculation.

    Args:
        model: a loaded transformers causal LM or encoder-decoder (Whisper, BART, T5), or a PEFT
            model around one.
        assistant_model: a smaller causal LM on the same device, which drafts; or what ``drafter``
            takes. Without both, drafts are looked up in the request's own text (prompt lookup).
        drafter: what drafts instead of an assistant model, see :func:`load_drafter`: ``"lookup"``,
            ``"suffix"``, ``"mtp"``, a folder or Hub repository of a trained head or a smaller
            model, a loaded model, or several of these (``"lookup+mtp"``, or a list); or an object
            of your own that proposes token trees, see :class:`Drafter`. ``generate(...,
            drafter=...)`` overrides this for one call, which then speculates without ``slo_tpot``,
            too.
        tokenizer: the model's tokenizer. An assistant model with another tokenizer can draft if
            both tokenizers are given.
        assistant_tokenizer: the assistant model's tokenizer, if it differs from ``tokenizer``.
        config: settings; the defaults of :class:`SLOSpecConfig` if omitted.
        make_policy: makes a policy of your own, see :class:`Policy`, instead of the config's;
            called for every call of ``generate`` with the config and the models'
            :class:`StepCosts`.
        always: speculate calls without ``slo_tpot``, too. Otherwise they run stock ``generate``.
        fallback: if speculation does not support the model or an option of a call, run stock
            ``generate`` with a :class:`FallbackWarning` instead of raising. ``generate(...,
            fallback=...)`` overrides this for one call.

    Returns:
        The same model. Enabling it again replaces all settings.

    Raises:
        InvalidTypeError: an argument has the wrong type.
        InvalidInputError: there is no such drafter, or both a drafter and an assistant model were
            given.
        UnsupportedModelError: either model cannot verify or draft a token tree; the message says
            why.
        IncompatibleDraftError: the two models do not share a vocabulary or a device.
    """
    check_flag("always", always)
    decoder = Decoder(
        model, assistant_model, drafter=drafter, tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer,
        config=config, make_policy=make_policy, fallback=fallback,
    )  # fmt: skip
    decoder.scope = "all calls of generate" if always else "calls of generate with slo_tpot"
    _restore_generate(model)
    owner: Any = decoder.model  # the wrapped model, whose generate a PEFT model calls
    replaced = owner.__dict__.get("generate")  # a generate that other code set on the instance
    decoder.replaced = (replaced,)
    of_class = type(owner).generate
    signature = inspect.signature(types.MethodType(of_class, owner))

    @functools.wraps(of_class)
    def generate(
        self: Any,
        *args: Any,
        slo_tpot: SLOTpot = None,
        fallback: bool | None = None,
        drafter: Drafting | None = None,
        **kwargs: Any,
    ) -> Any:
        if self is not owner:  # `self` is a deep copy, which copied this method
            if slo_tpot is not None or drafter is not None:
                raise InvalidInputError(
                    f"{'drafter' if slo_tpot is None else 'slo_tpot'} was given to a copy of an "
                    "enabled model; enable the copy itself"
                )
            of_copy = copy.deepcopy(replaced, {id(owner): self}) or types.MethodType(
                type(self).generate, self
            )
            return of_copy(*args, **kwargs)
        arguments = _by_name(signature.bind_partial(*args, **kwargs))
        if (
            not always
            and slo_tpot is None
            and drafter is None
            and configured("slo_tpot", owner, arguments) is None
            and not decoder.is_led
        ):
            return (replaced or types.MethodType(type(owner).generate, owner))(*args, **kwargs)
        return decoder.generate(slo_tpot, arguments, fallback, drafter)

    # TRL calls generate_batch if use_transformers_continuous_batching is set.
    if always and hasattr(owner, "generate_batch"):
        owner.__dict__["generate_batch"] = functools.partial(_generate_batch, owner)
    # Callers that inspect __wrapped__ find stock generate's plain function.
    wrapped = getattr(of_class, "__wrapped__", of_class)
    vars(generate).update(
        __signature__=_with_our_arguments(signature),
        __wrapped__=wrapped,
        replaced=replaced,
        decoder=decoder,
    )
    owner.__dict__["generate"] = types.MethodType(generate, owner)
    if model is not owner:
        adapted = model.__dict__.get("generate")
        model.__dict__["generate"] = functools.partial(
            _generate_of_adapted, model, adapted, fallback
        )
        vars(model.__dict__["generate"])["replaced"] = adapted
    logger.info(
        "speculating %s: %s (%s), drafts: %s",
        decoder.scope,
        type(owner).__name__,
        size_and_place(owner),
        decoder.drafts,
    )
    return model


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return the arguments of a call by the names of stock ``generate``'s parameters."""
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            arguments |= zip(POSITIONAL[len(arguments) :], value, strict=False)
        else:
            arguments[name] = value
    return arguments


def _generate_of_adapted(
    model: Any, replaced: Any, default_fallback: bool, *args: Any, **kwargs: Any
) -> Any:
    """Run a PEFT model's own ``generate``, which hooks every layer and then calls ours; with
    ``slo_tpot`` or ``drafter``, ``adapter_names`` is refused or falls back to stock ``generate``.
    """
    speculates = any(kwargs.get(name) is not None for name in ("slo_tpot", "drafter"))
    if kwargs.get("adapter_names") is not None and speculates:
        given = kwargs.pop("fallback", None)
        if not (default_fallback if given is None else given):
            raise UnsupportedOptionError(
                "adapter_names, one adapter per row, cannot be combined with slo_tpot; set_adapter one for the batch"
            )
        warnings.warn(
            "stock generate runs instead, for adapter_names", FallbackWarning, stacklevel=2
        )
        kwargs = {name: value for name, value in kwargs.items() if name not in OURS}
    return (replaced or types.MethodType(type(model).generate, model))(*args, **kwargs)


def _generate_batch(owner: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the class's own ``generate_batch``, and warn that it does not speculate."""
    warnings.warn(
        "generate_batch does not speculate; call generate (in TRL, use_transformers_continuous_batching=False), or "
        "SLOSpecGenerator.submit for continuous batching",
        FallbackWarning,
        stacklevel=2,
    )
    return type(owner).generate_batch(owner, *args, **kwargs)


def decoder_of(model: PreTrainedModel, argument: str = "model") -> Decoder | None:
    """Return the decoder of a model that :func:`enable` was called on, else None. Error messages
    name the model ``argument``.
    """
    generate = check_causal_lm(argument, model).__dict__.get("generate")
    return getattr(generate, "decoder", None)


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Set the model's ``generate`` to what it was before :func:`enable`; does nothing if it is not
    enabled. A later call with ``slo_tpot`` raises InvalidInputError.
    """
    if decoder_of(model) is not None:
        _restore_generate(model)
        owner: Any = check_causal_lm("model", model)
        owner.__dict__.setdefault(VALIDATE, types.MethodType(_validate_model_kwargs, owner))
    return model


@contextlib.contextmanager
def enabled(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | Drafting | None = None,
    **options: Any,
) -> Iterator[PreTrainedModel]:
    """Let a model speculate within a ``with`` block; afterwards it is enabled as before, or not.

    Args:
        model, assistant_model, options: the arguments of :func:`enable`.

    Raises:
        SLOSpecError: as raised by :func:`enable`.
    """
    owners = (check_causal_lm("model", model), model)
    earlier = [
        {name: owner.__dict__[name] for name in ATTRIBUTES if name in owner.__dict__}
        for owner in owners
    ]
    undo = disable if decoder_of(model) is None else _restore_generate
    enable(model, assistant_model, **options)
    try:
        yield model
    finally:
        undo(model)
        for owner, attributes in zip(owners, earlier, strict=True):
            owner.__dict__.update(attributes)


def _validate_model_kwargs(self: Any, model_kwargs: dict[str, Any]) -> None:
    """Check a disabled model's arguments as stock ``generate`` does, but name :func:`enable` as the
    way out for ``slo_tpot`` and the like, which stock calls unused.
    """
    if given := [name for name in OURS if model_kwargs.get(name) is not None]:
        raise InvalidInputError(
            f"{', '.join(given)} needs an enabled model; call hf_slospec.enable(model) first"
        )
    type(self)._validate_model_kwargs(self, model_kwargs)


def _restore_generate(model: PreTrainedModel) -> None:
    """Remove what :func:`enable` and :func:`disable` have set on a model."""
    owner = check_causal_lm("model", model)
    checks = owner.__dict__.get(VALIDATE)
    if getattr(checks, "__func__", None) is _validate_model_kwargs:
        del owner.__dict__[VALIDATE]
    if decoder_of(model) is not None:
        replaced = owner.__dict__.pop("generate").replaced
        owner.__dict__.pop("generate_batch", None)
        adapted = model.__dict__.pop("generate", None)  # set if it is a PEFT model around the owner
        for each, before in ((owner, replaced), (model, getattr(adapted, "replaced", None))):
            if before is not None:
                each.__dict__["generate"] = before


def _with_our_arguments(signature: inspect.Signature) -> inspect.Signature:
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in zip(OURS, (SLOTpot, bool | None, Drafting | None), strict=True)
    ]
    theirs = [parameter for name, parameter in signature.parameters.items() if name not in OURS]
    return signature.replace(
        parameters=sorted([*theirs, *added], key=lambda parameter: parameter.kind)
    )
