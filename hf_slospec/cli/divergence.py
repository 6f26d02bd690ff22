"""Divergences of speculated output from stock ``generate``, and whether rounding explains them.

Two forwards that are equal in exact arithmetic (one token or many, one row or a batch) round
differently in bf16 and fp16. Greedy output can then differ, but only where the two best tokens are
closer than that rounding."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_slospec.config import Exact
from hf_slospec.errors import InvalidInputError, InvalidTypeError, UnsupportedOptionError
from hf_slospec.generate.arguments import check_decoder_only
from hf_slospec.generate.call import Decoder, decode
from hf_slospec.generate.enable import decoder_of
from hf_slospec.generate.prepare import prepare
from hf_slospec.generate.processors import is_stateless, processors_of_rows
from hf_slospec.generate.rows import pad_token
from hf_slospec.generate.stock import StockCall, stock_generate
from hf_slospec.model.properties import CACHE_NAME, CACHE_NAMES, cache_option, input_device

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
BATCHES = (2, 8)  # copies of a row in the batched forwards
# Tokens per forward on a K/V cache: 1 as in plain decoding, more as for draft trees
PIECES = (1, 3, 8, 24)
# Number of best tokens among which the noise of margins is measured. Held-out forwards of the
# embedded pair in bf16 moved the margin of the best two by more than the noise among 2 / 4 / 8 / 16
# / 32 tokens at 31 / 14 / 5 / 1 / 1 of 171 positions (margins below 1).
CANDIDATES = 16
GUARANTEES = {  # by SLOSpecConfig.exact
    None: "guaranteed: none in fp32, near-ties in other dtypes",
    "self": 'guaranteed by exact="self": the same output however it is computed here, which stock may not have',
    "bits": 'guaranteed by exact="bits": stock\'s output of every row alone',
}
# (row, new tokens, logits [vocab]) -> scores [vocab]
Scores = Callable[[int, list[int], torch.Tensor], torch.Tensor]
OURS_ONLY = (  # arguments that are not passed to the stock call
    *("slo_tpot", "fallback", "assistant_model", "assistant_tokenizer", "streamer"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size"),
)


@dataclass(frozen=True)
class Divergence:
    """The first position of one row at which stock and speculated output differ.

    The logits are taken after the call's logits processors, if it has any. They come from one plain
    forward of the row alone over the tokens before the divergence, in the model's dtype. No number
    comes from a packed forward."""

    row: int
    position: int  # index among the new tokens
    stock_token: int
    our_token: int
    stock_logit: float
    our_logit: float
    rounding: float  # spacing of the model's dtype at the larger of the two logits
    noise: float  # largest change of a margin between equal plain forwards at this position

    @property
    def margin(self) -> float:
        """Distance of the two logits; nan or inf if a processor had excluded one of the tokens."""
        return abs(self.stock_logit - self.our_logit)

    @property
    def is_near_tie(self) -> bool:
        """Return whether the margin is at most twice ``rounding``, or at most ``noise``.

        Each of the two logits may be rounded to the other side, so that two spacings vanish. That
        alone would be too strict: a logit carries the rounding of every layer below it. ``noise``
        is measured: the largest change, over plain forwards that are equal in exact arithmetic, of
        the margin between any two of the 16 best tokens. The forwards are the row alone, 2 and 8
        copies of it as a batch, the prompt and then 1, 3, 8 or 24 tokens at a time on a cache, and
        a copy of the model in the next wider dtype. At a near-tie, transformers itself may choose
        the other token when it calls the same model in another shape; rounding explains no other
        divergence.
        """
        return self.margin <= max(2.0 * self.rounding, self.noise)

    def __str__(self) -> str:
        return (
            f"new token {self.position}: stock has token {self.stock_token}, hf_slospec {self.our_token}, "
            f"margin {self.margin:.3g}, rounding {self.rounding:.3g}, noise {self.noise:.3g} "
            f"({'near tie' if self.is_near_tie else 'not a near tie'})"
        )


@dataclass(frozen=True)
class DivergenceReport:
    """Comparison of stock and speculated output of one call; ``print`` shows a line for each
    divergence.
    """

    dtype: torch.dtype
    num_tokens: int  # compared: up to and including each row's first divergence, else the whole row
    divergences: list[Divergence]  # at most one per row, by row
    # New tokens per row, padded as ``generate`` pads them
    stock_tokens: list[list[int]] = field(repr=False)
    our_tokens: list[list[int]] = field(repr=False)
    exact: Exact = None  # guarantee that was in force; see SLOSpecConfig

    @property
    def num_rows(self) -> int:
        return len(self.stock_tokens)

    @property
    def all_near_ties(self) -> bool:
        return all(divergence.is_near_tie for divergence in self.divergences)

    def __str__(self) -> str:
        near = sum(divergence.is_near_tie for divergence in self.divergences)
        lines = [
            f"{self.num_rows} rows, {self.num_tokens} tokens compared in {str(self.dtype).removeprefix('torch.')}: "
            f"{len(self.divergences)} divergences, {near} of them at near-ties; {GUARANTEES[self.exact]}"
        ]
        lines += [f"row {divergence.row}, {divergence}" for divergence in self.divergences]
        return "\n".join(lines)


def divergence_report(
    speculated: Any,
    inputs: Mapping[str, torch.Tensor],
    *,
    our_tokens: Sequence[Sequence[int]] | None = None,
    **generate_options: Any,
) -> DivergenceReport:
    """Run stock ``generate`` and ours on the same inputs, greedily, and explain every row that
    differs.

    Only the first difference of a row counts, as the texts differ after it. Each costs some
    forwards of that row, and all of them together one copy of the model in the next wider dtype
    (not for quantized or offloaded models, whose noise is therefore underestimated). In fp32 the
    report is expected to be empty.

    Args:
        speculated: a generator, or a model that :func:`hf_slospec.enable` was called on.
        inputs: the tokenizer's output: ``input_ids`` [batch, length] int64 and, if padded, an
            ``attention_mask``.
        our_tokens: new tokens of every row that were generated with speculation before, such as by
            submitted requests; None: the report generates them.
        generate_options: further arguments of both calls, such as ``max_new_tokens``; ``slo_tpot``
            is passed to the speculated call only.

    Raises:
        InvalidTypeError: an argument has the wrong type.
        UnsupportedModelError: the model is an encoder-decoder.
        InvalidInputError: the model is not enabled, or ``our_tokens`` has another number of rows.
        UnsupportedOptionError: sampling (whether two tokens are close depends on the noise drawn),
            ``max_time``, prompts that are not tokens, and options that speculated ``generate``
            refuses, whatever ``fallback`` says.
    """
    if not isinstance(inputs, Mapping):
        raise InvalidTypeError(
            f"inputs must be a mapping such as tokenizer(..., return_tensors='pt') returns, got {type(inputs).__name__}"
        )
    decoder = getattr(speculated, "decoder", None)
    if not isinstance(decoder, Decoder):
        decoder = decoder_of(speculated, "speculated")
    if decoder is None:
        raise InvalidInputError(
            "the model does not speculate yet; call hf_slospec.enable(model, draft) first"
        )
    check_decoder_only(decoder.model, "divergence_report")
    options = {"tokenizer": getattr(speculated, "tokenizer", None), **generate_options, **inputs}
    for name in ("inputs_embeds", *CACHE_NAMES):
        if options.get(name) is not None:
            raise UnsupportedOptionError(
                f"divergence_report compares texts as tokens; pass input_ids, not {name}"
            )
    options.pop(
        "fallback", None
    )  # a call that fell back to stock generate would be compared with itself
    call = prepare(
        decoder.speculator_of(options, options.pop("drafter", None)),
        options.pop("slo_tpot", None),
        options | {"return_dict_in_generate": True},
    )
    _check_comparable(call.stock)
    rows = call.rows
    laid_out = rows.input_ids.tolist()  # with padding, as processors see them
    prompts = [list(params.prompt) for params in call.params]
    prompt_len = len(laid_out[0])
    processors = processors_of_rows(call.stock.processors, len(prompts))

    def scores(row: int, new: list[int], logits: torch.Tensor) -> torch.Tensor:
        processed = logits.to(torch.float32, copy=True)[None]
        input_ids = torch.tensor([laid_out[row] + new], device=logits.device)
        for processor in processors[call.params[row].row]:
            processed = processor(input_ids, processed)
        return processed[0]

    if our_tokens is None:
        output = decode(call)
        ours = output.sequences[:, prompt_len:].tolist()
        lengths = [metrics.tokens for metrics in output.slo]
    else:
        if len(our_tokens) != len(prompts):
            raise InvalidInputError(
                f"our_tokens has {len(our_tokens)} rows and the inputs have {len(prompts)}"
            )
        ours = [list(row) for row in our_tokens]
        lengths = [len(row) for row in our_tokens]
    plain = {name: value for name, value in options.items() if name not in OURS_ONLY}
    stock = stock_generate(decoder.model)(**plain | {"return_dict_in_generate": False})[
        :, prompt_len:
    ].tolist()
    pad = pad_token(call.stock.config)
    length = max(len(stock[0]), len(ours[0]))  # all rows are padded to the longest
    for row in (*stock, *ours):
        row += [pad] * (length - len(row))
    dtype = call.speculator.target.packed.autocast or decoder.model.dtype
    divergences = find_divergences(decoder.model, prompts, stock, ours, dtype, scores)
    ends = {divergence.row: divergence.position + 1 for divergence in divergences}
    num_tokens = sum(ends.get(row, length) for row, length in enumerate(lengths))
    return DivergenceReport(
        dtype, num_tokens, divergences, stock, ours, call.speculator.config.exact
    )


def _check_comparable(stock: StockCall) -> None:
    """Raise UnsupportedOptionError for calls whose output does not follow from the logits of single
    positions.
    """
    if stock.config.do_sample:
        raise UnsupportedOptionError(
            "divergence_report compares greedy output: with do_sample=True, how close two tokens are depends on "
            "the noise drawn; pass do_sample=False"
        )
    if stock.config.max_time is not None:
        raise UnsupportedOptionError(
            "max_time ends outputs by the clock, not by the text; leave it out"
        )
    if not all(is_stateless(processor) for processor in stock.processors):
        raise UnsupportedOptionError(
            "divergence_report examines single positions, which a processor with state does not allow; leave out "
            "guidance_scale, watermarks and processors of your own"
        )


def find_divergences(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    stock: Sequence[list[int]],
    ours: Sequence[list[int]],
    dtype: torch.dtype | None = None,
    scores: Scores = lambda row, new, logits: logits,
) -> list[Divergence]:
    """Return the first divergence of every row, for given outputs.

    Args:
        prompts: tokens of every row.
        stock, ours: new tokens per row, of the same length in both.
        dtype: dtype that the model computes in; None: dtype of its weights.
        scores: (row, new tokens, logits) -> scores by which the next token is chosen, such as the
            logits after logits processors.
    """
    divergences: list[Divergence] = []
    wide: Any = None
    for row, pair in enumerate(zip(stock, ours, strict=True)):
        if (position := first_difference(*pair)) is None:
            continue
        if wide is None and (wider := WIDER.get(model.dtype)) and not _is_stored_elsewhere(model):
            copied: Any = copy.deepcopy(model)  # made once, and only if something diverged
            wide = copied.to(wider)
        new = stock[row][:position]
        logits = _equal_forwards(model, wide, prompts[row], new)
        values = torch.stack(
            [scores(row, new, each).double() for each in logits]
        )  # [num_forwards, vocab] f64
        tokens = stock[row][position], ours[row][position]
        stock_logit, our_logit = values[0, list(tokens)].tolist()
        best = values[0].topk(min(CANDIDATES, values.shape[1])).indices.tolist()
        noise = margin_noise(values[:, sorted({*best, *tokens})])
        rounding = spacing(dtype or model.dtype, max(abs(stock_logit), abs(our_logit)))
        divergences.append(
            Divergence(row, position, *tokens, stock_logit, our_logit, rounding, noise)
        )
    return divergences


def _is_stored_elsewhere(model: PreTrainedModel) -> bool:
    """Return whether the weights are quantized or offloaded, so that a copy cannot simply be cast."""
    return getattr(model, "is_quantized", False) or any(
        p.device.type == "meta" for p in model.parameters()
    )


def first_difference(stock: Sequence[int], ours: Sequence[int]) -> int | None:
    return next((index for index, (a, b) in enumerate(zip_longest(stock, ours)) if a != b), None)


def spacing(dtype: torch.dtype, magnitude: float) -> float:
    """Return the distance from a finite ``magnitude`` (at least 0) to the next number of ``dtype``."""
    info = torch.finfo(dtype)
    _, exponent = math.frexp(
        max(magnitude, info.tiny)
    )  # magnitude = fraction * 2**exponent, fraction in [0.5, 1)
    return info.eps * 2.0 ** (exponent - 1)


def margin_noise(scores: torch.Tensor) -> float:
    """Return the largest change of the margin between any two tokens from one forward to another.

    Args:
        scores: [num_forwards, num_tokens]; tokens that a processor excluded (not finite) do not
            count.
    """
    scores = scores[:, scores.isfinite().all(0)]
    if scores.shape[1] < 2:
        return 0.0
    margins = scores[:, :, None] - scores[:, None, :]  # [num_forwards, num_tokens, num_tokens]
    return float((margins.amax(0) - margins.amin(0)).max())


@torch.no_grad()
def _equal_forwards(
    model: PreTrainedModel, wide: Any, prompt: list[int], new: list[int]
) -> list[torch.Tensor]:
    """Return logits of the token after ``prompt + new``, by forwards that differ in rounding only.

    Returns:
        [vocab] each, f32 or wider. The first comes from one forward of the row alone, the last from
        the model in the wider dtype, if there is one.
    """
    ids = torch.tensor([prompt + new], device=input_device(model))  # [1, length]
    keep = (
        {"logits_to_keep": 1}
        if "logits_to_keep" in inspect.signature(model.forward).parameters
        else {}
    )

    def whole(which: Any, batch: int) -> Any:
        return which(input_ids=ids.expand(batch, -1), use_cache=False, **keep).logits[0, -1]

    def in_pieces(size: int) -> Any:
        output = model(input_ids=ids[:, : len(prompt)], use_cache=True, **keep)
        for piece in ids[:, len(prompt) :].split(size, dim=1) if new else ():
            output = model(
                input_ids=piece, use_cache=True, **cache_option(output[CACHE_NAME], model), **keep
            )
        return output.logits[0, -1]

    logits = [
        whole(model, 1),
        *(whole(model, rows) for rows in BATCHES),
        *(in_pieces(size) for size in PIECES),
    ]
    return [each.float() for each in logits] + ([] if wide is None else [whole(wide, 1)])
