"""The drop-in: ``model.generate(..., slo_tpot=...)`` on top of transformers' own ``generate``.

Stock ``generate`` prepares inputs, lengths, processors and criteria (see
:mod:`hf_slospec.generate.prepare`), so everything it accepts keeps its meaning.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import warnings
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_slospec.config import NewPolicy, SLOSpecConfig
from hf_slospec.drafters.load_drafter import Drafting
from hf_slospec.errors import FallbackWarning, InvalidInputError, UnsupportedOptionError
from hf_slospec.generate.arguments import check_flag, configured
from hf_slospec.generate.call import Decoder
from hf_slospec.model.loading import check_causal_lm
from hf_slospec.request.slo import SLOTpot

# Stock generate's first parameters, for calls of one that takes *args.
POSITIONAL = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
)


def enable(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | None = None,
    *,
    drafter: Drafting | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    config: SLOSpecConfig | None = None,
    make_policy: NewPolicy | None = None,
    always: bool = False,
    fallback: bool = False,
) -> PreTrainedModel:
    """Let ``model.generate`` take ``slo_tpot`` and decode such calls by tree speculation.

    Args:
        model: a loaded transformers causal LM or encoder-decoder (Whisper, BART, T5), or a PEFT
            model around one.
        assistant_model: a smaller causal LM, on the same device. Without one, and without a
            drafter, the request's own tokens draft (prompt lookup).
        drafter: what drafts instead, see :func:`load_drafter`: ``"lookup"``, ``"suffix"``,
            ``"mtp"``, a folder or Hub repository of a trained head or a smaller model, a loaded
            model, or several of these (``"lookup+mtp"``, or a list); or an object of your own that
            proposes token trees, see :class:`Drafter`.
        tokenizer: the model's; with ``assistant_tokenizer``, an assistant model with another
            tokenizer can draft, as where a call of ``generate`` passes all three.
        assistant_tokenizer: the assistant model's.
        config: settings; the defaults of :class:`SLOSpecConfig` if omitted.
        make_policy: makes a policy of your own, see :class:`Policy`, in place of the config's:
            called with the config and the :class:`StepCosts` of the models for every call.
        always: speculate calls without ``slo_tpot`` too. Otherwise they run stock ``generate``.
        fallback: run stock ``generate``, with a :class:`FallbackWarning`, where the model or an
            option of the call cannot be speculated, instead of raising. ``generate(...,
            fallback=...)`` overrides it for a call.

    Returns:
        The same model. Enabling it again replaces all settings.

    Raises:
        InvalidTypeError: an argument has the wrong type.
        InvalidInputError: there is no such drafter, or there are a drafter and an assistant model.
        UnsupportedModelError: either model cannot verify or draft a token tree; the message says
            why.
        IncompatibleDraftError: the two models do not share a vocabulary or a device.
    """
    check_flag("always", always)
    decoder = Decoder(
        model, assistant_model, drafter=drafter, tokenizer=tokenizer, assistant_tokenizer=assistant_tokenizer,
        config=config, make_policy=make_policy, fallback=fallback,
    )  # fmt: skip
    _restore_generate(model)
    owner: Any = decoder.model  # a PEFT model hands generate on to the model it wraps
    replaced = owner.__dict__.get("generate")  # a generate that was set on the instance, if any
    decoder.replaced = (replaced,)
    of_class = type(owner).generate
    signature = inspect.signature(types.MethodType(of_class, owner))

    @functools.wraps(of_class)
    def generate(
        self: Any, *args: Any, slo_tpot: SLOTpot = None, fallback: bool | None = None, **kwargs: Any
    ) -> Any:
        if self is not owner:  # a deep copy has this method, too, but no engine
            if slo_tpot is not None:
                raise InvalidInputError(
                    "slo_tpot was given to a copy of an enabled model; enable the copy itself"
                )
            of_copy = copy.deepcopy(replaced, {id(owner): self}) or types.MethodType(
                type(self).generate, self
            )
            return of_copy(*args, **kwargs)
        arguments = _by_name(signature.bind_partial(*args, **kwargs))
        if (
            not always
            and slo_tpot is None
            and configured("slo_tpot", owner, arguments) is None
            and not decoder.is_led
        ):
            return (replaced or types.MethodType(type(owner).generate, owner))(*args, **kwargs)
        return decoder.generate(slo_tpot, arguments, fallback)

    # TRL calls it with use_transformers_continuous_batching.
    if always and hasattr(owner, "generate_batch"):
        owner.__dict__["generate_batch"] = functools.partial(_generate_batch, owner)
    # What callers find at a stock generate: a plain function.
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
    return model


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return the arguments of a call by the names that stock ``generate`` has for them."""
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
    """Run a PEFT model's own ``generate``, which hooks every layer before it calls ours; refuse
    ``adapter_names``.
    """
    if kwargs.get("adapter_names") is not None and kwargs.get("slo_tpot") is not None:
        given = kwargs.pop("fallback", None)
        if not (default_fallback if given is None else given):
            raise UnsupportedOptionError(
                "adapter_names, one adapter per row, cannot be combined with slo_tpot; set_adapter one for the batch"
            )
        warnings.warn(
            "stock generate runs instead, for adapter_names", FallbackWarning, stacklevel=2
        )
        del kwargs["slo_tpot"]
    return (replaced or types.MethodType(type(model).generate, model))(*args, **kwargs)


def _generate_batch(owner: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the class's own ``generate_batch``, and say that it does not speculate."""
    warnings.warn(
        "generate_batch does not speculate; call generate (in TRL, use_transformers_continuous_batching=False), or "
        "SLOSpecGenerator.submit for continuous batching",
        FallbackWarning,
        stacklevel=2,
    )
    return type(owner).generate_batch(owner, *args, **kwargs)


def decoder_of(model: PreTrainedModel, argument: str = "model") -> Decoder | None:
    """Return the decoder of a model that :func:`enable` was called on, else None; errors name
    ``argument``.
    """
    generate = check_causal_lm(argument, model).__dict__.get("generate")
    return getattr(generate, "decoder", None)


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Give ``model`` its stock ``generate`` back, if it is enabled."""
    _restore_generate(model)
    return model


def _restore_generate(model: PreTrainedModel) -> None:
    if decoder_of(model) is not None:
        owner = check_causal_lm("model", model)
        replaced = owner.__dict__.pop("generate").replaced
        owner.__dict__.pop("generate_batch", None)
        adapted = model.__dict__.pop("generate", None)  # on a PEFT model around the owner
        for each, before in ((owner, replaced), (model, getattr(adapted, "replaced", None))):
            if before is not None:
                each.__dict__["generate"] = before


def _with_our_arguments(signature: inspect.Signature) -> inspect.Signature:
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in (("slo_tpot", SLOTpot), ("fallback", bool | None))
    ]
    theirs = [
        parameter
        for name, parameter in signature.parameters.items()
        if name not in ("slo_tpot", "fallback")
    ]
    return signature.replace(
        parameters=sorted([*theirs, *added], key=lambda parameter: parameter.kind)
    )
