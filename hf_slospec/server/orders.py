"""Conversion of request bodies into an ``Order``: the prompt, and the arguments of ``submit``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hf_slospec.errors import InvalidInputError
from hf_slospec.generate.processors import OccurrencePenalties
from hf_slospec.generate.rows import model_end_tokens
from hf_slospec.server.bodies import CompletionBody, SamplingBody
from hf_slospec.server.chat_templates import PromptInputs
from hf_slospec.server.engine import Order, ServedEngine
from hf_slospec.server.limits import ContextOverflowError
from hf_slospec.server.options import Objective

SEEDS = 2**63  # seeds of choices are below this
# With lower temperatures, decoding is greedy, as in vLLM: logits divided by them may overflow.
LEAST_TEMPERATURE = 1e-5
# llm-d's request headers with SLOs in milliseconds; the second of each pair is deprecated.
SLO_HEADERS: dict[str, tuple[str, ...]] = {
    "slo_tpot": ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
    "slo_ttft": ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    "slo_e2e": (),  # only in bodies
}


def asked_slos(
    body: SamplingBody, headers: Mapping[str, str], objective: Objective
) -> dict[str, Any]:
    """Return a request's SLOs in seconds (``slo_tpot`` may be stages). Each comes from the body,
    else from a header, else from the objective.

    Raises:
        InvalidInputError: a header is not a positive number.
    """
    slos: dict[str, Any] = {}
    for field, names in SLO_HEADERS.items():
        value = getattr(body, field)
        name = next((name for name in names if name in headers), None)
        if value is None and name is not None:
            value = _seconds_of(name, headers[name])
        slos[field] = getattr(objective, field) if value is None else value
    return slos


def _seconds_of(header: str, text: str) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise InvalidInputError(
            f"header {header} must be a positive number of milliseconds, got {text!r}"
        )
    return milliseconds / 1e3


def prompt_of(prompt: str | list[int], body: CompletionBody, engine: ServedEngine) -> PromptInputs:
    """Return the token ids of one prompt of a completion; raises InvalidInputError."""
    if isinstance(prompt, str):
        adds = body.add_special_tokens is not False
        ids: list[int] = engine.tokenizer(prompt, add_special_tokens=adds)["input_ids"]
        if not ids:
            raise InvalidInputError("prompt is empty; give it at least one token")
        return PromptInputs(ids)
    if max(prompt) >= engine.vocab_size:
        raise InvalidInputError(
            f"prompt has token {max(prompt)}, and the vocabulary has {engine.vocab_size} tokens"
        )
    return PromptInputs(prompt)


def order_of(
    body: SamplingBody,
    inputs: PromptInputs,
    terms: dict[str, Any],
    engine: ServedEngine,
    choice: int,
) -> Order:
    """Return the prompt and the arguments of ``submit`` for one choice of a request.

    Args:
        terms: the arguments of ``submit`` that depend on the tenant or the objective.
        choice: index of the choice among those of its prompt; shifts the seed.

    Raises:
        InvalidInputError: a field cannot be served.
    """
    prompt = inputs.tokens
    arguments = _sampling(body, engine.generation_config) | terms | inputs.of_images
    max_new_tokens = _max_tokens(body, len(prompt), engine)
    if body.min_tokens > max_new_tokens:
        raise InvalidInputError(
            f"min_tokens is {body.min_tokens}, and at most {max_new_tokens} fit"
        )
    for name in ("logit_bias", "stop_token_ids"):
        for token in getattr(body, name) or ():
            if not 0 <= token < engine.vocab_size:
                raise InvalidInputError(
                    f"{name}: token ids must be from 0 to {engine.vocab_size - 1}, got {token}"
                )
    arguments |= {
        "max_new_tokens": max_new_tokens,
        "speculative": body.speculative,
        "eos_token_id": end_tokens(body, engine.generation_config) or None,
    }
    optional = {
        "seed": None if body.seed is None else (body.seed + choice) % SEEDS,
        "min_new_tokens": body.min_tokens or None,
        "stop_strings": body.stop_strings or None,
        "sequence_bias": {(token,): bias for token, bias in (body.logit_bias or {}).items()}
        or None,
        "repetition_penalty": body.repetition_penalty,
        "logprobs": body.num_top_logprobs,
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    if body.presence_penalty or body.frequency_penalty:
        penalties = OccurrencePenalties(len(prompt), body.presence_penalty, body.frequency_penalty)
        arguments["logits_processor"] = [penalties]
    return Order(prompt, arguments, body.json_schema)


def end_tokens(body: SamplingBody, generation_config: Any) -> list[int]:
    """Return the token ids that end the output: the model's end tokens, unless ``ignore_eos``, and
    the request's ``stop_token_ids``.
    """
    of_model = [] if body.ignore_eos else model_end_tokens(generation_config)
    return [*of_model, *(body.stop_token_ids or [])]


def _sampling(body: SamplingBody, generation_config: Any) -> dict[str, Any]:
    """Return the sampling arguments of ``submit``. Each comes from the body, else from the
    generation config if that samples, else is neutral.
    """
    defaults = generation_config if generation_config.do_sample else None
    options = {}
    for name, neutral in {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}.items():
        candidates = (getattr(body, name), getattr(defaults, name, None), neutral)
        options[name] = next((value for value in candidates if value is not None), None)
    if options["top_k"] == -1:  # vLLM's value for all tokens
        options["top_k"] = 0
    if float(options["temperature"] or 0) < LEAST_TEMPERATURE:
        return {"do_sample": False}
    return {"do_sample": True} | {
        name: value for name, value in options.items() if value is not None
    }


def _max_tokens(body: SamplingBody, prompt_len: int, engine: ServedEngine) -> int:
    room = engine.max_len - prompt_len
    needed = body.max_tokens or 1
    if needed > room:
        raise ContextOverflowError.of_tokens(body.prompt_field, engine.max_len, prompt_len, needed)
    return min(body.default_max_tokens, room) if body.max_tokens is None else body.max_tokens
