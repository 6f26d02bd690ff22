"""The drop-in: ``model.generate(..., slo_tpot=...)`` on top of transformers' own ``generate``.

Stock ``generate`` prepares inputs, lengths, processors and criteria and then calls our decoding method through
its ``custom_generate`` hook, so everything it accepts means what it always meant.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_slospec.checks import (
    Targets,
    check_arguments,
    check_causal_lm,
    check_config,
    check_options,
    check_prompts,
    check_targets,
    targets_by_row,
)
from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.request import Request, RequestMetrics
from hf_slospec.errors import InvalidInputError, UnsupportedOptionError
from hf_slospec.models.sampling import StockSampler
from hf_slospec.row_processors import processors_of_row
from hf_slospec.speculator import Speculator, clock


@dataclass
class SLOSpecOutput(GenerateDecoderOnlyOutput):
    """HF's output with one :class:`RequestMetrics` per row."""

    slo: list[RequestMetrics] | None = None


def enable(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | None = None,
    *,
    config: SLOSpecConfig | None = None,
    always: bool = False,
) -> PreTrainedModel:
    """Let ``model.generate`` take ``slo_tpot`` and decode such calls by tree speculation.

    Args:
        model: a loaded transformers causal LM.
        assistant_model: a smaller causal LM with the same vocabulary, on the same device. Without one, the
            request's own tokens draft (prompt lookup).
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
    if assistant_model is not None:
        check_causal_lm("assistant_model", assistant_model)
    config = check_config(config)
    speculator = Speculator(model, assistant_model, config)  # may refuse; nothing has been changed yet
    disable(model)
    replaced = model.__dict__.get("generate")  # a custom generate of the instance's own, if it has one
    stock = stock_generate(model)
    overrides: weakref.WeakKeyDictionary[PreTrainedModel, Speculator] = weakref.WeakKeyDictionary()

    @functools.wraps(stock)
    def generate(self: PreTrainedModel, *args: Any, slo_tpot: Targets = None, **kwargs: Any) -> Any:
        if self is not model:  # a deep copy carries this method along; it has no engine of its own
            if slo_tpot is not None:
                raise InvalidInputError("slo_tpot was given to a copy of an enabled model; enable the copy itself")
            return type(self).generate(self, *args, **kwargs)
        arguments = dict(zip(inspect.signature(stock).parameters, args, strict=False)) | kwargs
        if slo_tpot is None:
            slo_tpot = configured("slo_tpot", model, arguments)
        if slo_tpot is None and not always:
            return (replaced or stock)(*args, **kwargs)
        chosen, own = speculator, arguments.pop("assistant_model", None)
        if own is not None and own is not assistant_model:  # another draft for this call
            check_causal_lm("assistant_model", own)
            if own not in overrides:
                overrides[own] = Speculator(model, own, config)
            chosen = overrides[own]
        return generate_speculated(chosen, stock, slo_tpot, arguments)

    generate.__signature__ = _with_slo_tpot(inspect.signature(stock))
    generate.replaced = replaced
    model.generate = types.MethodType(generate, model)
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Give ``model`` its stock ``generate`` back. Does nothing if it is not enabled."""
    generate = model.__dict__.get("generate")
    if hasattr(generate, "replaced"):
        del model.__dict__["generate"]
        if generate.replaced is not None:
            model.generate = generate.replaced
    return model


def stock_generate(model: PreTrainedModel) -> Callable[..., Any]:
    """The model class's own ``generate``, bound, whatever stands on the instance."""
    return type(model).generate.__get__(model)


def generate_speculated(
    speculator: Speculator, stock: Callable[..., Any], slo_tpot: Targets, arguments: dict[str, Any]
) -> Any:
    """Run stock ``generate`` with the speculated decoding method in place of its own loop."""
    arrived_s = clock()
    slo_tpot = check_targets(slo_tpot)
    check_arguments(arguments)
    speculator.prepare()
    for name in ("inputs", "input_ids"):
        if isinstance(ids := arguments.get(name), torch.Tensor) and ids.ndim == 1:
            arguments[name] = ids[None]
            if isinstance(mask := arguments.get("attention_mask"), torch.Tensor) and mask.ndim == 1:
                arguments["attention_mask"] = mask[None]
    _take_stop_strings(speculator.target.model, arguments)
    streamer = arguments.get("streamer")

    def decode(
        model: PreTrainedModel,
        input_ids: torch.Tensor,  # [batch, padded_len] int64
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,  # transformers takes a named parameter of ours for one of its caller's
    ) -> Any:
        check_options(generation_config, logits_processor, model_kwargs)
        targets = targets_by_row(slo_tpot, len(input_ids), generation_config.num_return_sequences)
        requests = _requests(input_ids, model_kwargs.get("attention_mask"), stopping_criteria, targets, arrived_s)
        check_prompts(requests, speculator, input_ids)
        paddings = [row[: len(row) - r.prompt_len] for row, r in zip(input_ids.tolist(), requests, strict=True)]
        processors = [processors_of_row(logits_processor, row, len(requests)) for row in range(len(requests))]
        sampler = StockSampler(processors, generation_config.do_sample, paddings, input_ids.device)
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
    if others and not eos and len(input_ids) > 1:
        raise UnsupportedOptionError(
            "stop_strings, max_time and stopping_criteria need an eos_token_id when there are several rows: without "
            "one, stock generate goes on writing to rows that have stopped; set eos_token_id, or leave slo_tpot out"
        )

    def stop_after(padding: list[int]) -> Callable[[list[int]], bool]:
        def is_stop(tokens: list[int]) -> bool:
            if tokens[-1] in eos or not others:
                return tokens[-1] in eos
            row = torch.tensor([padding + tokens], device=device)
            return any(bool(torch.as_tensor(criterion(row, None)).all()) for criterion in others)

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


def configured(name: str, model: PreTrainedModel, arguments: dict[str, Any]) -> Any:
    """A setting of the call, else of its generation config, else of the model's."""
    if (value := arguments.get(name)) is not None:
        return value
    for config in (arguments.get("generation_config"), model.generation_config):
        if (value := getattr(config, name, None)) is not None:
            return value
    return None


def _take_stop_strings(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Turn stop strings into a criterion here: stock drops ``tokenizer`` when the decoding method is a custom one."""
    strings, tokenizer = configured("stop_strings", model, arguments), arguments.get("tokenizer")
    if strings is not None and tokenizer is not None:  # without a tokenizer stock says what is missing
        own = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or []), own])
        arguments["stop_strings"] = None


def _with_slo_tpot(signature: inspect.Signature) -> inspect.Signature:
    slo_tpot = inspect.Parameter("slo_tpot", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Targets)
    *parameters, last = signature.parameters.values()
    return signature.replace(parameters=[*parameters, slo_tpot, last])
