"""The drop-in: ``model.generate(..., slo_tpot=...)`` on top of transformers' own ``generate``.

Stock ``generate`` prepares inputs, lengths, processors and criteria and then calls our decoding method through
its ``custom_generate`` hook, so everything it accepts means what it always meant.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationConfig,
    GenerationMode,
    MaxLengthCriteria,
)
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.request import Request, RequestMetrics
from hf_slospec.errors import InvalidInputError, InvalidTypeError, UnsupportedOptionError
from hf_slospec.models.sampling import StockSampler
from hf_slospec.speculator import Speculator, clock

Targets = Sequence[float | None] | float | None
PREPARED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}


@dataclass
class SLOSpecOutput(GenerateDecoderOnlyOutput):
    """HF's output with one :class:`RequestMetrics` per row."""

    slo: list[RequestMetrics] | None = None


def enable(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel,
    *,
    config: SLOSpecConfig | None = None,
    always: bool = False,
) -> PreTrainedModel:
    """Let ``model.generate`` take ``slo_tpot`` and decode such calls by tree speculation.

    Args:
        model: a loaded transformers causal LM.
        assistant_model: a smaller causal LM with the same vocabulary, on the same device.
        config: how to speculate; the defaults of :class:`SLOSpecConfig` if omitted.
        always: speculate calls without ``slo_tpot`` too. Otherwise they are stock ``generate``, untouched.

    Returns:
        The same model. Enabling it again replaces draft and config.

    Raises:
        InvalidTypeError: an argument is not what it should be.
        UnsupportedModelError: either model cannot hold a tree of tokens; the message says why.
        IncompatibleDraftError: the two models do not share a vocabulary or a device.
    """
    check_causal_lm("model", model)
    check_causal_lm("assistant_model", assistant_model)
    config = check_config(config)
    speculator = Speculator(model, assistant_model, config)  # may refuse; nothing has been changed yet
    disable(model)
    stock = model.generate

    @functools.wraps(stock)
    def generate(self: PreTrainedModel, *args: Any, slo_tpot: Targets = None, **kwargs: Any) -> Any:
        if self is not model:  # a deep copy carries this method along; it has no engine of its own
            return type(self).generate(self, *args, **kwargs)
        arguments = dict(zip(list(inspect.signature(stock).parameters), args, strict=False)) | kwargs
        if slo_tpot is None:
            slo_tpot = configured_targets(model, arguments.get("generation_config"))
        if slo_tpot is None and not always:
            return stock(*args, **kwargs)
        own = arguments.pop("assistant_model", None)
        chosen = speculator if own is None or own is assistant_model else Speculator(model, own, config)
        return generate_speculated(chosen, stock, slo_tpot, arguments)

    generate.__signature__ = _with_slo_tpot(inspect.signature(stock))  # type: ignore[attr-defined]
    generate.is_speculated = True  # type: ignore[attr-defined]
    model.generate = types.MethodType(generate, model)  # type: ignore[method-assign]
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Give ``model`` its stock ``generate`` back. Does nothing if it is not enabled."""
    if getattr(model.__dict__.get("generate"), "is_speculated", False):
        del model.__dict__["generate"]
    return model


def generate_speculated(
    speculator: Speculator, stock: Callable[..., Any], slo_tpot: Targets, arguments: dict[str, Any]
) -> Any:
    """Run stock ``generate`` with the speculated decoding method in place of its own loop."""
    arrived_s = clock()
    check_targets(slo_tpot)
    _check_arguments(arguments)
    for name in ("inputs", "input_ids"):
        if isinstance(ids := arguments.get(name), torch.Tensor) and ids.ndim == 1:
            arguments[name] = ids[None]
            if isinstance(mask := arguments.get("attention_mask"), torch.Tensor) and mask.ndim == 1:
                arguments["attention_mask"] = mask[None]
    streamer = arguments.get("streamer")

    def decode(
        model: PreTrainedModel,
        input_ids: torch.Tensor,  # [batch, padded_len] int64
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,  # transformers takes a named parameter of ours for one of its caller's
    ) -> Any:
        _check_options(generation_config, logits_processor, model_kwargs)
        targets = targets_by_row(slo_tpot, len(input_ids), generation_config.num_return_sequences)
        requests = _requests(input_ids, model_kwargs.get("attention_mask"), stopping_criteria, targets, arrived_s)
        _check_prompts(requests, speculator, input_ids)
        paddings = [row[: len(row) - r.prompt_len] for row, r in zip(input_ids.tolist(), requests, strict=True)]
        sampler = StockSampler(logits_processor, generation_config.do_sample, paddings, input_ids.device)
        rows = _Rows(input_ids, requests, generation_config._pad_token_tensor, streamer)
        speculator.run(requests, sampler, rows.stream)
        rows.end()
        if not generation_config.return_dict_in_generate:
            return rows.sequences()
        return SLOSpecOutput(sequences=rows.sequences(), slo=[request.metrics() for request in requests])

    return stock(**arguments, custom_generate=decode)


class _Rows:
    """The batch as stock ``generate`` lays it out: prompts left-padded, finished rows padded on the right."""

    def __init__(self, input_ids: torch.Tensor, requests: list[Request], pad: torch.Tensor | None, streamer: Any):
        self.input_ids, self.requests, self.streamer = input_ids, requests, streamer
        self.pad = 0 if pad is None else int(pad)
        self.num_streamed = 0

    def new_tokens(self, request: Request, begin: int, end: int) -> list[int]:
        own = request.tokens[request.prompt_len :][begin:end]
        return own + [self.pad] * (end - begin - len(own))

    def sequences(self) -> torch.Tensor:
        """-> [batch, padded_len + most new tokens] int64"""
        length = max(request.num_emitted for request in self.requests)
        new = [self.new_tokens(request, 0, length) for request in self.requests]
        return torch.cat((self.input_ids, torch.tensor(new, device=self.input_ids.device)), dim=-1)

    def stream(self) -> None:
        """Hand over every position that all unfinished rows have reached, one [batch] tensor each, as stock does."""
        if self.streamer is None:
            return
        unfinished = [request.num_emitted for request in self.requests if not request.is_finished]
        ready = min(unfinished) if unfinished else max(request.num_emitted for request in self.requests)
        for position in range(self.num_streamed, ready):
            column = [self.new_tokens(request, position, position + 1)[0] for request in self.requests]
            self.streamer.put(torch.tensor(column))
        self.num_streamed = max(self.num_streamed, ready)

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()


def _requests(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,  # [batch, padded_len], None if all ones
    stopping_criteria: Any,
    targets: list[float | None],
    arrived_s: float,
) -> list[Request]:
    """One request per row, padding stripped; criteria are asked after every token, on the row as stock lays it out."""
    device = input_ids.device
    max_new_tokens = stopping_criteria.max_length - input_ids.shape[1]
    eos = {int(i) for c in stopping_criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id}
    others = [c for c in stopping_criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))]

    def stop_after(padding: list[int]) -> Callable[[list[int]], bool]:
        def is_stop(tokens: list[int]) -> bool:
            if tokens[-1] in eos or not others:
                return tokens[-1] in eos
            row = torch.tensor([padding + tokens], device=device)
            return any(bool(criterion(row, None).all()) for criterion in others)

        return is_stop

    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    requests = []
    for index, (row, kept, target_s) in enumerate(zip(input_ids.tolist(), mask.tolist(), targets, strict=True)):
        prompt_len = sum(bool(k) for k in kept)
        if not all(kept[len(kept) - prompt_len :]):
            raise InvalidInputError(
                f"attention_mask masks tokens of row {index} after its first real one; pad on the left "
                "(tokenizer.padding_side = 'left')"
            )
        begin = len(row) - prompt_len
        stop = stop_after(row[:begin])
        requests.append(Request(index, row[begin:], max_new_tokens, target_s, stop, arrived_s))
    return requests


# ---------------------------------------------------------------- checks


def check_causal_lm(name: str, model: Any) -> None:
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise InvalidTypeError(
            f"{name} must be a loaded transformers model with a language-modelling head, such as "
            f"AutoModelForCausalLM.from_pretrained(...) returns; got {type(model).__name__}"
        )


def check_config(config: Any) -> SLOSpecConfig:
    if config is not None and not isinstance(config, SLOSpecConfig):
        raise InvalidTypeError(f"config must be a SLOSpecConfig, got {type(config).__name__}")
    return config or SLOSpecConfig()


def check_targets(slo_tpot: Any) -> None:
    """Refuse anything but a positive finite number of seconds, None, or a sequence of those."""
    if isinstance(slo_tpot, torch.Tensor) or hasattr(slo_tpot, "tolist"):
        slo_tpot = slo_tpot.tolist()
    for target_s in slo_tpot if isinstance(slo_tpot, (list, tuple)) else [slo_tpot]:
        if target_s is None:
            continue
        if isinstance(target_s, bool) or not isinstance(target_s, numbers.Real):
            raise InvalidTypeError(
                f"slo_tpot must be seconds per output token, None, or a list of those; got {target_s!r}"
            )
        if not math.isfinite(target_s) or target_s <= 0:
            raise InvalidInputError(
                f"slo_tpot must be a positive, finite number of seconds per output token, got {target_s!r}; "
                "use None for a row without a target"
            )


def targets_by_row(slo_tpot: Targets, num_rows: int, num_return_sequences: int) -> list[float | None]:
    """One target per row; a list may name the prompts (each stands for its returned sequences) or all rows."""
    if hasattr(slo_tpot, "tolist"):
        slo_tpot = slo_tpot.tolist()
    if not isinstance(slo_tpot, (list, tuple)):
        return [slo_tpot] * num_rows
    if len(slo_tpot) * num_return_sequences == num_rows:
        return [target_s for target_s in slo_tpot for _ in range(num_return_sequences)]
    if len(slo_tpot) == num_rows:
        return list(slo_tpot)
    raise InvalidInputError(
        f"slo_tpot has {len(slo_tpot)} entries for {num_rows} rows; give one number for all rows or one entry per row"
    )


def configured_targets(model: PreTrainedModel, generation_config: GenerationConfig | None) -> Targets:
    """``slo_tpot`` as an attribute of the call's generation config, or of the model's."""
    for config in (generation_config, model.generation_config):
        if (slo_tpot := getattr(config, "slo_tpot", None)) is not None:
            return slo_tpot
    return None


def _check_arguments(arguments: dict[str, Any]) -> None:
    """What must be refused before stock ``generate`` sees it."""
    for name, instead in (
        ("inputs_embeds", "pass input_ids"),
        ("past_key_values", "pass the whole text as input_ids"),
        ("position_ids", "leave positions to generate"),
        ("custom_generate", "call generate without slo_tpot"),
    ):
        if arguments.get(name) is not None:
            raise UnsupportedOptionError(f"{name} cannot be combined with slo_tpot; {instead}")
    for name in ("inputs", "input_ids"):
        ids = arguments.get(name)
        if (
            isinstance(ids, torch.Tensor)
            and ids.shape[-1:].numel() == 0
            or isinstance(ids, torch.Tensor)
            and not ids.numel()
        ):
            raise InvalidInputError(f"{name} is empty, shape {list(ids.shape)}; give every row at least one token")


def _check_options(generation_config: GenerationConfig, logits_processor: Any, model_kwargs: dict[str, Any]) -> None:
    """Refuse what a tree of tokens cannot honour, on the prepared generation config."""
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise UnsupportedOptionError(
            f"slo_tpot works with greedy decoding and sampling, not with {mode.value.replace('_', ' ')}; "
            "set num_beams=1 (and no other search option), or call generate without slo_tpot"
        )
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, False):
            raise UnsupportedOptionError(f"{name}=True is not available with slo_tpot; call generate without slo_tpot")
    if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in logits_processor):
        raise UnsupportedOptionError(
            "guidance_scale runs the model a second time per token in step with decoding, which speculation breaks; "
            "call generate without slo_tpot"
        )
    if extra := sorted(k for k, v in model_kwargs.items() if k not in PREPARED and v is not None):
        raise UnsupportedOptionError(f"{', '.join(extra)} cannot be combined with slo_tpot; leave it out")


def _check_prompts(requests: list[Request], speculator: Speculator, input_ids: torch.Tensor) -> None:
    limit = speculator.target.max_positions
    for request in requests:
        if request.prompt_len == 0:
            raise InvalidInputError(
                f"row {request.index} of input_ids is empty or all padding; give it at least one token"
            )
        if limit is not None and request.prompt_len + request.max_new_tokens > limit:
            raise InvalidInputError(
                f"row {request.index}: prompt of {request.prompt_len} tokens + max_new_tokens={request.max_new_tokens} exceed "
                f"the model's {limit} positions; shorten the prompt or set max_new_tokens to at most "
                f"{max(limit - request.prompt_len, 0)}"
            )
    if int(input_ids.max()) >= speculator.target.vocab_size or int(input_ids.min()) < 0:
        raise InvalidInputError(
            f"input_ids holds token ids outside 0 .. {speculator.target.vocab_size - 1}; is it another model's tokenizer?"
        )


def _with_slo_tpot(signature: inspect.Signature) -> inspect.Signature:
    slo_tpot = inspect.Parameter("slo_tpot", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Targets)
    *parameters, last = signature.parameters.values()
    return signature.replace(parameters=[*parameters, slo_tpot, last])
