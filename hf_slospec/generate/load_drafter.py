"""Loading of drafters: of every kind, recognised by name or by their files."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_slospec.errors import InvalidInputError, InvalidTypeError, SLOSpecError, UnsupportedModelError
from hf_slospec.generate.validation import check_causal_lm, check_tokenizer
from hf_slospec.models.checkpoints import load_model
from hf_slospec.models.compatibility.running import input_device, vocab_size
from hf_slospec.models.drafters.methods import (
    AssistantMethod,
    DraftMethod,
    HeadMethod,
    HybridMethod,
    LookupMethod,
    SuffixMethod,
    assistant_method,
    model_before_last,
)
from hf_slospec.models.drafters.translation import TokenTranslation
from hf_slospec.models.heads.dflash import DFlashHead
from hf_slospec.models.heads.head import DraftHead
from hf_slospec.models.heads.loading import LOADING_ERRORS, layout_of, load_mtp, open_checkpoint
from hf_slospec.models.heads.unsupported import check_is_causal_lm

logger = logging.getLogger(__name__)

WITHOUT_MODEL = ("lookup", "suffix")
NAMES = (*WITHOUT_MODEL, "mtp")
Source = str | PreTrainedModel | DraftMethod


def load_drafter(
    source: Source | Sequence[Source],
    target: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    assistant_tokenizer: PreTrainedTokenizerBase | None = None,
    share_texts: bool = False,
    allow_missing: bool = False,
) -> DraftMethod:
    """Load a drafter for a target, to be given as ``drafter=``; what was found is logged, and is its ``repr``.

    Args:
        source: one of

            - ``"lookup"``: prompt lookup; ``"suffix"``: suffix trees of the text (extra ``suffix``);
            - ``"mtp"``: the multi-token prediction layer that the target was published with;
            - a folder or Hub repository of a trained head (EAGLE-3 in three layouts, DFlash, MTP) or of a smaller
              causal LM, known by its config and tensors; safetensors only;
            - a loaded causal LM;
            - several of these, as a sequence or joined by ``+``, whose trees are merged: ``"lookup+mtp"``. The one with
              a model is the last.
        target: the loaded model that verifies.
        tokenizer: the target's. With ``assistant_tokenizer`` it lets a causal LM with another tokenizer draft; both are
            loaded from the folders or repositories of the models if they are needed and not given.
        assistant_tokenizer: that of the causal LM.
        share_texts: suffix trees hold the outputs of other requests with the same ``cache_salt``, too.
        allow_missing: accept a causal LM whose files lack tensors, or have others than its class.

    Returns:
        The drafter, in the target's dtype and on its device.

    Raises:
        InvalidTypeError, InvalidInputError: there is no such source.
        UnsupportedModelError: it cannot draft, or its files are pickled or incomplete.
        IncompatibleDraftError: it was made for another target.
    """
    target = check_causal_lm("target", target)
    check_tokenizer(tokenizer)
    check_tokenizer(assistant_tokenizer, "assistant_tokenizer")
    methods = [
        _method(part, target, tokenizer, assistant_tokenizer, share_texts, allow_missing) for part in parts_of(source)
    ]
    method = methods[0] if len(methods) == 1 else HybridMethod(methods)
    method.check(target)
    logger.info("drafter: %s", method.kind)
    return method


def parts_of(source: Source | Sequence[Source]) -> Sequence[Source]:
    """Return the parts of a source, at least one; raise InvalidTypeError if it has none."""
    parts: Any = source
    if isinstance(source, str) and not os.path.isdir(source):
        parts = [part.strip() for part in source.split("+")]
    if isinstance(parts, (str, PreTrainedModel, DraftMethod)):
        parts = [parts]
    if not isinstance(parts, Sequence) or not parts:
        raise InvalidTypeError(f"source must be a name, a folder, a model or several of these, got {source!r}")
    return parts


def check_order(names: Sequence[str]) -> None:
    """Raise InvalidInputError if another part than the last one has a model, as can be told before it is loaded."""
    if any(name not in WITHOUT_MODEL for name in names[:-1]):
        raise InvalidInputError(model_before_last(" + ".join(names)))


def _method(
    source: Any,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | None,
    share_texts: bool,
    allow_missing: bool,
) -> DraftMethod:
    if isinstance(source, DraftMethod):
        return source
    if isinstance(source, (DraftHead, DFlashHead)):
        return HeadMethod(source)
    if isinstance(source, PreTrainedModel):
        return _assistant(source, target, tokenizer, assistant_tokenizer)
    if not isinstance(source, str) or not source:
        raise InvalidTypeError(f"source must be a name, a folder, a model or several of these, got {source!r}")
    if source == "lookup":
        return LookupMethod()
    if source == "suffix":
        return SuffixMethod(share_texts)
    if source == "mtp":
        return HeadMethod(load_mtp(target))
    checkpoint = open_checkpoint(source)
    if (layout := layout_of(checkpoint)) is not None:
        return HeadMethod(layout.load(checkpoint, target))
    check_is_causal_lm(checkpoint)
    try:
        model: Any = load_model(AutoModelForCausalLM, source, allow_missing, dtype=target.dtype, use_safetensors=True)
    except SLOSpecError:
        raise
    except LOADING_ERRORS as error:
        raise UnsupportedModelError(f"{source} is neither a known head nor a causal LM: {error}") from error
    return _assistant(model.to(input_device(target)).eval(), target, tokenizer, assistant_tokenizer or source)


def _assistant(
    model: Any,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    assistant_tokenizer: PreTrainedTokenizerBase | str | None,
) -> DraftMethod:
    """Return a causal LM as a drafter, with a translation where the tokenizers are known to differ."""
    if not isinstance(method := assistant_method(model), AssistantMethod):
        return method
    own = _tokenizer(assistant_tokenizer)
    targets = tokenizer if own is None or tokenizer is not None else _tokenizer(target.config.name_or_path)
    if own is None or targets is None or own.get_vocab() == targets.get_vocab():
        return method
    return AssistantMethod(model, TokenTranslation(targets, own, vocab_size(target), vocab_size(model)))


def _tokenizer(source: PreTrainedTokenizerBase | str | None) -> PreTrainedTokenizerBase | None:
    """Return a tokenizer, that of a folder or repository if it has one."""
    if not isinstance(source, str):
        return source
    if not source:  # a model that was not loaded
        return None
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source)
    except LOADING_ERRORS:  # there is none
        return None
    return loaded
