"""Where speculated output parts from stock ``generate``, and whether rounding explains it.

Two forwards that are equal in exact arithmetic (one token or many, one row or a batch) round differently in
bf16 and fp16. Greedy output can then part, but only where the two best tokens are as close as rounding is coarse.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_slospec.errors import InvalidInputError, InvalidTypeError, UnsupportedOptionError
from hf_slospec.generate.enable import is_enabled, stock_generate
from hf_slospec.generate.processors import is_stateless, processors_of_row
from hf_slospec.generate.rows import pad_token
from hf_slospec.generate.validation import check_causal_lm, configured
from hf_slospec.models.compatibility.probe import input_device
from hf_slospec.models.sampling import Processor
from hf_slospec.serving.generator import SLOSpecGenerator

WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
BATCHES = (2, 8)  # equal rows of the batched forwards
PIECES = (1, 3, 8, 24)  # tokens that one forward adds to a cache: as plain decoding does, and like draft trees
# Tokens among which noise is measured. Held-out forwards of the embedded pair in bf16 moved the margin of the best
# two by more than the noise among 2 / 4 / 8 / 16 / 32 tokens at 31 / 14 / 5 / 1 / 1 of 171 positions (margins below 1).
CANDIDATES = 16
OURS_ONLY = (
    "slo_tpot",
    "fallback",
    "assistant_model",
    "streamer",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
)  # what the stock call is not given


@dataclass(frozen=True)
class Divergence:
    """The first position of one row at which stock and speculated output differ.

    Logits are those the choice is made from (after the call's logits processors, if it has any), of one plain forward
    of the row alone over the common text, in the model's dtype. Our own forward takes no part in any number here.
    """

    row: int
    position: int  # of the new token; 0 is the first
    stock_token: int
    our_token: int
    stock_logit: float
    our_logit: float
    rounding: float  # spacing of the model's dtype at the larger of the two logits
    noise: float  # by how much equal plain forwards disagree at this position

    @property
    def margin(self) -> float:
        """Distance of the two logits; nan or inf if a processor had ruled one of the tokens out."""
        return abs(self.stock_logit - self.our_logit)

    @property
    def is_near_tie(self) -> bool:
        """Whether the margin is no larger than ``rounding`` or ``noise``, whichever is larger.

        ``rounding`` alone would be too strict: a logit carries the rounding of every layer below it. ``noise`` is
        measured, not assumed: the largest change, over plain forwards that are equal in exact arithmetic, of the margin
        between any two of the 16 best tokens here. The forwards are the row alone, 2 and 8 copies of it as a batch,
        the prompt and then 1, 3, 8 or 24 tokens at a time on a cache, and a copy of the model in the next wider dtype.
        So a near-tie says that transformers itself, calling the same model in another shape, may choose the other
        token; anything else is no matter of rounding.
        """
        return self.margin <= max(self.rounding, self.noise)


@dataclass(frozen=True)
class DivergenceReport:
    """Stock and speculated output of one call, compared; ``print`` shows it as a table."""

    dtype: torch.dtype
    num_tokens: int  # compared: up to and including each row's first divergence, else the whole row
    divergences: list[Divergence]  # at most one per row, by row
    stock_tokens: list[list[int]] = field(repr=False)  # new tokens per row, as ``generate`` pads them
    our_tokens: list[list[int]] = field(repr=False)

    @property
    def num_rows(self) -> int:
        return len(self.stock_tokens)

    @property
    def all_near_ties(self) -> bool:
        """True too if nothing diverged."""
        return all(divergence.is_near_tie for divergence in self.divergences)

    def __str__(self) -> str:
        near = sum(divergence.is_near_tie for divergence in self.divergences)
        lines = [
            f"{self.num_rows} rows, {self.num_tokens} tokens compared in {str(self.dtype).removeprefix('torch.')}: "
            f"{len(self.divergences)} divergences, {near} of them at near-ties"
        ]
        if self.divergences:
            names = ("row", "position", "stock token", "our token", "stock logit", "our logit")
            lines.append("  ".join((*names, "  margin", "rounding", "   noise", "near-tie")))
        for d in self.divergences:
            lines.append(  # noqa: PERF401 - a comprehension of three lines of format reads worse
                f"{d.row:>3}  {d.position:>8}  {d.stock_token:>11}  {d.our_token:>9}  {d.stock_logit:>11.5g}  "
                f"{d.our_logit:>9.5g}  {d.margin:>8.3g}  {d.rounding:>8.3g}  {d.noise:>8.3g}  "
                f"{'yes' if d.is_near_tie else 'NO':>8}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Prompt:
    """One row of a call: its prompt, and what turns its logits into the scores a token is chosen by."""

    tokens: list[int]
    laid_out: list[int] = field(default_factory=list)  # the same with padding, as processors see it
    processors: Sequence[Processor] = ()

    def scores(self, new: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Logits [vocab] of the token after ``new``, processed.  -> [vocab] f32, or f64 without processors"""
        if not self.processors:
            return logits
        scores = logits.to(torch.float32, copy=True)[None]
        input_ids = torch.tensor([self.laid_out + new], device=logits.device)
        for processor in self.processors:
            scores = processor(input_ids, scores)
        return scores[0]


def divergence_report(
    speculated: SLOSpecGenerator | PreTrainedModel, inputs: Mapping[str, torch.Tensor], **generate_options: Any
) -> DivergenceReport:
    """Run stock ``generate`` and ours on the same inputs, greedily, and explain every row that differs.

    Only the first difference of a row counts: what follows it continues another text. Each one costs some forwards of
    that row, and all of them together one copy of the model in the next wider dtype (not for quantized
    or offloaded models, whose noise is therefore underrated). In fp32 the report is expected to be empty.

    Args:
        speculated: a generator, or a model that :func:`hf_slospec.enable` was called on.
        inputs: what the tokenizer returned: ``input_ids`` [batch, length] int64 and, if padded, an ``attention_mask``.
        generate_options: everything else both calls get, such as ``max_new_tokens``; ``slo_tpot`` is for ours only.

    Raises:
        InvalidTypeError: an argument is not what it should be.
        InvalidInputError: the model is not enabled.
        UnsupportedOptionError: sampling (whether two tokens are close depends on the noise drawn), ``max_time``,
            prompts that are not tokens, and what speculated ``generate`` refuses, with or without ``fallback``.
    """
    if not isinstance(inputs, Mapping):
        raise InvalidTypeError(
            f"inputs must be a mapping such as tokenizer(..., return_tensors='pt') returns, got {type(inputs).__name__}"
        )
    is_generator = isinstance(speculated, SLOSpecGenerator)
    model = check_causal_lm("speculated", speculated.model if is_generator else speculated)
    if not is_generator and not is_enabled(model):
        raise InvalidInputError("the model does not speculate yet; call hf_slospec.enable(model, draft) first")
    options = {"tokenizer": speculated.tokenizer if is_generator else None, **generate_options, **inputs}
    for name in ("inputs_embeds", "past_key_values"):
        if options.get(name) is not None:
            raise UnsupportedOptionError(f"divergence_report reads texts as tokens; pass input_ids, not {name}")
    plain = {name: value for name, value in options.items() if name not in OURS_ONLY}
    prompts, pad = _prepared(model, plain)
    if configured("slo_tpot", model, options) is None:
        options["slo_tpot"] = [None] * len(prompts)  # makes an enabled model speculate, and promises nothing
    # A call that fell back to stock generate would be compared with itself.
    output = speculated.generate(**options | {"return_dict_in_generate": True, "fallback": False})
    ours = _new_tokens(output.sequences, prompts)
    stock = _new_tokens(stock_generate(model)(**plain | {"return_dict_in_generate": False}), prompts)
    length = max(len(stock[0]), len(ours[0]))  # the text ends with its longest row, which may be a row that differs
    for row in (*stock, *ours):
        row += [pad] * (length - len(row))
    divergences = find_divergences(model, prompts, stock, ours)
    ends = {divergence.row: divergence.position + 1 for divergence in divergences}
    num_tokens = sum(ends.get(row, metrics.tokens) for row, metrics in enumerate(output.slo))
    return DivergenceReport(model.dtype, num_tokens, divergences, stock, ours)


def find_divergences(
    model: PreTrainedModel, prompts: Sequence[Prompt], stock: Sequence[list[int]], ours: Sequence[list[int]]
) -> list[Divergence]:
    """The first difference of every row, for outputs that exist already.

    Args:
        prompts: one per row.
        stock, ours: new tokens per row, of the same length in both.
    """
    places = [(row, first_difference(*pair)) for row, pair in enumerate(zip(stock, ours, strict=True))]
    found, wide = [], None
    for row, position in places:
        if position is None:
            continue
        if wide is None and (dtype := WIDER.get(model.dtype)) and not _is_stored_elsewhere(model):
            wide = copy.deepcopy(model).to(dtype)  # made once, and only if something diverged
        prompt, new = prompts[row], stock[row][:position]
        logits = _equal_forwards(model, wide, prompt.tokens, new)
        scores = torch.stack([prompt.scores(new, each).double() for each in logits])  # [num_forwards, vocab] f64
        tokens = stock[row][position], ours[row][position]
        stock_logit, our_logit = scores[0, list(tokens)].tolist()
        best = scores[0].topk(min(CANDIDATES, scores.shape[1])).indices.tolist()
        noise = margin_noise(scores[:, sorted({*best, *tokens})])
        rounding = spacing(model.dtype, max(abs(stock_logit), abs(our_logit)))
        found.append(Divergence(row, position, *tokens, stock_logit, our_logit, rounding, noise))
    return found


def _is_stored_elsewhere(model: PreTrainedModel) -> bool:
    """Whether the weights are quantized or offloaded, so that a copy cannot simply be cast."""
    return getattr(model, "is_quantized", False) or any(p.device.type == "meta" for p in model.parameters())


def first_difference(stock: Sequence[int], ours: Sequence[int]) -> int | None:
    """Index of the first position at which two equally long sequences differ."""
    return next((at for at, (a, b) in enumerate(zip(stock, ours, strict=True)) if a != b), None)


def spacing(dtype: torch.dtype, magnitude: float) -> float:
    """Distance from ``magnitude`` (0 or more) to the next number of ``dtype`` above it; nan for inf and nan."""
    if not math.isfinite(magnitude):
        return math.nan
    info = torch.finfo(dtype)
    _, exponent = math.frexp(max(magnitude, info.tiny))  # magnitude = fraction * 2**exponent, fraction in [0.5, 1)
    return info.eps * 2.0 ** (exponent - 1)


def margin_noise(scores: torch.Tensor) -> float:
    """The most by which the margin between any two tokens changes from one forward to another.

    Args:
        scores: [num_forwards, num_tokens]; tokens that a processor ruled out (not finite) do not count.
    """
    scores = scores[:, scores.isfinite().all(0)]
    if scores.shape[1] < 2:
        return 0.0
    margins = scores[:, :, None] - scores[:, None, :]  # [num_forwards, num_tokens, num_tokens]
    return float((margins.amax(0) - margins.amin(0)).max())


@torch.no_grad()
def _equal_forwards(
    model: PreTrainedModel, wide: PreTrainedModel | None, prompt: list[int], new: list[int]
) -> list[torch.Tensor]:
    """Logits of the token after ``prompt + new``, by forwards that only rounding tells apart.

    Returns:
        [vocab] each, f32 or wider; first the row alone in one piece. The last is of the wider model, if there is one.
    """
    ids = torch.tensor([prompt + new], device=input_device(model))  # [1, length]
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    def whole(which: PreTrainedModel, batch: int) -> torch.Tensor:
        return which(input_ids=ids.expand(batch, -1), use_cache=False, **keep).logits[0, -1]

    def in_pieces(size: int) -> torch.Tensor:
        output = model(input_ids=ids[:, : len(prompt)], use_cache=True, **keep)
        for piece in ids[:, len(prompt) :].split(size, dim=1) if new else ():
            output = model(input_ids=piece, past_key_values=output.past_key_values, use_cache=True, **keep)
        return output.logits[0, -1]

    logits = [whole(model, 1), *(whole(model, rows) for rows in BATCHES), *(in_pieces(size) for size in PIECES)]
    return [each.float() for each in logits] + ([] if wide is None else [whole(wide, 1)])


def _prepared(model: PreTrainedModel, plain: dict[str, Any]) -> tuple[list[Prompt], int]:
    """Rows and pad token of a call as stock ``generate`` prepares them, which is all it is made to do here."""
    prompts: list[Prompt] = []
    pad = 0

    def capture(
        model: PreTrainedModel,
        input_ids: torch.Tensor,  # [batch, padded_len] int64
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        nonlocal pad
        if generation_config.do_sample:
            raise UnsupportedOptionError(
                "divergence_report compares greedy output: with do_sample=True, how close two tokens are depends on "
                "the noise drawn; pass do_sample=False"
            )
        if generation_config.max_time is not None:
            raise UnsupportedOptionError("max_time ends outputs by the clock, not by the text; leave it out")
        if not all(is_stateless(processor) for processor in logits_processor):
            raise UnsupportedOptionError(
                "divergence_report looks at single positions, which a processor that may remember others cannot serve; "
                "leave out guidance_scale, watermarks and processors of your own"
            )
        pad = pad_token(generation_config)
        mask = model_kwargs.get("attention_mask")
        for row, ids in enumerate(input_ids):
            tokens = ids if mask is None else ids[mask[row].bool()]
            processors = processors_of_row(logits_processor, row, len(input_ids))
            prompts.append(Prompt(tokens.tolist(), ids.tolist(), processors))
        return input_ids

    # Stop strings want a tokenizer, which stock does not hand on beside a decoding method; they process no logits.
    unneeded = {"stop_strings": None, "return_dict_in_generate": False, "custom_generate": capture}
    stock_generate(model)(**{k: v for k, v in plain.items() if k != "tokenizer"} | unneeded)
    return prompts, pad


def _new_tokens(sequences: torch.Tensor, prompts: Sequence[Prompt]) -> list[list[int]]:
    """What follows the prompts in ``sequences`` [batch, padded_len + new].  -> [batch][new]"""
    return sequences[:, len(prompts[0].laid_out) :].tolist()
