"""Comparison of a user's checkpoint with stock ``generate``: tokens, speed and K/V."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_slospec.cli import benchmark
from hf_slospec.cli.budget import Show, TimeBudget
from hf_slospec.config import SLOSpecConfig
from hf_slospec.drafters.methods import DraftMethod
from hf_slospec.errors import InvalidInputError, SLOSpecError
from hf_slospec.generate.divergence import DivergenceReport, divergence_report, first_difference
from hf_slospec.models.inspection.properties import trained_len
from hf_slospec.serving.generator import SLOSpecGenerator
from hf_slospec.tiny.load import Pair

EXACT, NEAR_TIES, WRONG, REFUSED = "exact", "near ties only", "WRONG", "refused"
BATCH = 4  # rows of the left-padded batch
NEW_TOKENS = 64  # per output, unless that many would take too long
MIN_NEW_TOKENS = 8
PILOT_TOKENS = 4  # per output of the measurement that chooses the number of new tokens
# By kind of call: share of the time after which no further output begins. The measurement of speed has the rest.
SHARES = {"greedy": 0.25, "sampled": 0.35, "batcher": 0.5, "images": 0.55}
# Time of one output of each kind, and of one repeat of the speeds with its warm-up, in outputs of stock generate: ours
# may be slower, and takes further forwards to compare.
MIN_OUTPUTS, SPEED_OUTPUTS = 16, 12
# Drafts in every step: a policy that drafts nothing would compare plain decoding with itself.
ALWAYS_DRAFTS = {"policy": "fixed", "max_depth": 4, "max_width": 3}


@dataclass(frozen=True)
class Difference:
    """The first new token of one output that differs from stock's."""

    prompt: int  # number, from 1
    position: int  # index among the new tokens
    is_near_tie: bool | None  # None: not examined
    detail: str

    def __str__(self) -> str:
        kind = {True: "near tie", False: "not a near tie", None: "not examined"}[self.is_near_tie]
        return f"prompt {self.prompt}, new token {self.position}: {self.detail} ({kind})"


@dataclass(frozen=True)
class Comparison:
    """Outputs of one kind of call, compared with those of stock ``generate``."""

    name: str
    outputs: Sequence[Difference | None]  # None: equal
    refused: str | None = None  # reason, if the call was refused
    left_out: int = 0  # number of outputs for which there was no time

    @property
    def differences(self) -> list[Difference]:
        """The outputs that differ."""
        return [output for output in self.outputs if output is not None]

    @property
    def verdict(self) -> str:
        """One of exact, near ties only, WRONG and refused; differences that were not examined do not prove WRONG."""
        if self.refused is not None:
            return REFUSED
        if any(difference.is_near_tie is False for difference in self.differences):
            return WRONG
        return NEAR_TIES if self.differences else EXACT


def verdict_of(comparisons: Sequence[Comparison]) -> str:
    """Return the verdict on a model: the worst one of the calls that were not refused."""
    verdicts = {comparison.verdict for comparison in comparisons}
    return next(verdict for verdict in (WRONG, NEAR_TIES, EXACT, REFUSED) if verdict in verdicts)


class ModelCheck:
    """Comparisons of one target, with a fixed tree in every step.

    Args:
        texts: prompts, truncated to the target's positions; at least one is compared, more while there is time.
        new_tokens: maximum new tokens of every output; None: 64, or fewer so that there is time for all kinds of calls.
        budget: the time for everything.
        show: shows the progress.
        image_inputs: processed prompts with images; None: images are not compared.

    Raises:
        UnsupportedModelError, IncompatibleDraftError: target or drafter are refused.
        InvalidInputError: the target has no positions for so many new tokens.
    """

    def __init__(
        self,
        pair: Pair,
        method: DraftMethod,
        texts: Sequence[str],
        new_tokens: int | None,
        config: SLOSpecConfig,
        budget: TimeBudget,
        show: Show,
        image_inputs: Sequence[dict[str, Any]] | None = None,
    ):
        self.pair, self.method, self.texts, self.config = pair, method, list(texts), config
        self.image_inputs, self.budget, self.show = image_inputs, budget, show
        self.generator = SLOSpecGenerator(
            pair.target, None, pair.tokenizer, config.model_copy(update=ALWAYS_DRAFTS), drafter=method
        )
        longest = trained_len(pair.target) or pair.tokenizer.model_max_length
        self.max_prompt_len = longest - (new_tokens or min(NEW_TOKENS, longest // 2))
        if self.max_prompt_len < 1:
            raise InvalidInputError(
                f"--max-new-tokens {new_tokens} leaves no room for a prompt; the model has {longest} positions"
            )
        self.kv_bytes = 0  # maximum that the batcher held
        self._token_s = self._measured_token_s()
        self.new_tokens = new_tokens or self._affordable_tokens()
        self.options: dict[str, Any] = {"max_new_tokens": self.new_tokens}
        self._stock: dict[int, list[int]] = {}  # greedy outputs, by prompt

    @property
    def kv_bytes_per_token(self) -> list[int]:
        """Bytes of K and V per token, of the target and of a draft that has some."""
        return [model.kv_bytes_per_token for model in self.generator.decoder.speculator.models]

    def _measured_token_s(self) -> float:
        """Return stock's seconds per token, of the faster of two outputs."""
        target: Any = self.pair.target
        inputs, seconds = self._encoded(self.texts[:1]), []
        for _ in range(2):
            started_s = self.budget.elapsed_s
            target.generate(**inputs, do_sample=False, max_new_tokens=PILOT_TOKENS, min_new_tokens=PILOT_TOKENS)
            seconds.append((self.budget.elapsed_s - started_s) / PILOT_TOKENS)
        return min(seconds)

    def _affordable_tokens(self) -> int:
        left_s = max(self.budget.seconds - self.budget.elapsed_s, 0.0)
        affordable = left_s / max(self._token_s * (MIN_OUTPUTS + SPEED_OUTPUTS), 1e-9)
        return int(min(max(affordable, MIN_NEW_TOKENS), NEW_TOKENS))

    def comparisons(self) -> Iterator[Comparison]:
        """Compare all kinds of calls, one after another."""
        number = len(self.texts)
        kinds: dict[str, tuple[int, Callable[[], Iterable[Difference | None]]]] = {
            "greedy, one by one": (number, self._greedy),
            "sampled, one by one": (number, self._sampled),
            f"greedy, left-padded batch of {BATCH}": (min(BATCH, number), self._padded),
            "greedy, batcher": (number, self._submitted),
        }
        if self.image_inputs is not None:
            kinds["greedy, with images"] = len(self.image_inputs), self._with_images
        for name, (number, outputs) in kinds.items():
            self.show(f"comparing: {name}")
            try:
                compared = list(outputs())
                yield Comparison(name, compared, left_out=number - len(compared))
            except SLOSpecError as error:
                yield Comparison(name, [], str(error))

    def _while_time(self, kind: str, inputs: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield inputs with their numbers, from 1 on, as long as one more is likely to end in the time of its kind."""
        last_s = 0.0
        for number, prompt in enumerate(inputs, 1):
            started_s = self.budget.elapsed_s
            if number > 1 and not self.budget.allows(last_s, SHARES[kind]):
                return
            yield number, prompt
            last_s = self.budget.elapsed_s - started_s

    def _encoded(self, texts: Sequence[str]) -> dict[str, Any]:
        return benchmark.encoded(self.pair.tokenizer, list(texts), self.max_prompt_len, self.pair.target.device)

    def _prompts(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        return self._while_time(kind, (self._encoded([text]) for text in self.texts))

    def _report(self, inputs: dict[str, Any], **options: Any) -> DivergenceReport:
        return divergence_report(self.generator, inputs, do_sample=False, **self.options, **options)

    def _greedy(self) -> Iterator[Difference | None]:
        for number, inputs in self._prompts("greedy"):
            report = self._report(inputs)
            (self._stock[number],) = report.stock_tokens
            yield from self._examined(report, number)

    def _padded(self) -> Iterator[Difference | None]:
        yield from self._examined(self._report(self._encoded(self.texts[:BATCH])), 1)

    def _submitted(self) -> Iterator[Difference | None]:
        outputs = {}
        left_s = SHARES["batcher"] * self.budget.seconds - self.budget.elapsed_s
        affordable = int(left_s / max(self._token_s * self.new_tokens, 1e-9))  # as if decoded one by one
        texts = self.texts[: max(affordable, 1)]
        prompts = {number: self._encoded([text]) for number, text in enumerate(texts, 1)}
        with self.generator:
            handles = {
                number: self.generator.submit(
                    inputs["input_ids"][0].tolist(), block=True, do_sample=False, **self.options
                )
                for number, inputs in prompts.items()
            }
            for number, handle in handles.items():
                outputs[number] = handle.result().token_ids
                memory = self.generator.stats().memory
                self.kv_bytes = max(self.kv_bytes, 0 if memory is None else memory.target_kv + memory.draft_kv)
        for number, inputs in prompts.items():
            if outputs[number] == self._stock.get(number):
                yield None
            else:
                yield from self._examined(self._report(inputs, our_tokens=[outputs[number]]), number)

    def _sampled(self) -> Iterator[Difference | None]:
        for number, inputs in self._prompts("sampled"):
            yield self._compared(number, inputs, do_sample=True)

    def _with_images(self) -> Iterator[Difference | None]:
        for number, inputs in self._while_time("images", self.image_inputs or ()):
            yield self._compared(number, inputs, do_sample=False)

    def _compared(self, number: int, inputs: dict[str, Any], **options: Any) -> Difference | None:
        """Return the first difference of one output that :func:`divergence_report` cannot explain.

        In fp32 it counts as wrong. In other dtypes it is not examined: rounding may decide.
        """
        prompt_len = inputs["input_ids"].shape[1]
        new = []
        target: Any = self.pair.target
        for generate in (target.generate, self.generator.generate):
            torch.manual_seed(number)
            new.append(generate(**inputs, **self.options, **options)[0, prompt_len:].tolist())
        longest = max(map(len, new))
        stock, ours = (tokens + [-1] * (longest - len(tokens)) for tokens in new)  # -1 after the end
        if (position := first_difference(stock, ours)) is None:
            return None
        is_near_tie = False if self.pair.target.dtype == torch.float32 else None
        return Difference(number, position, is_near_tie, _tokens(stock[position], ours[position]))

    @staticmethod
    def _examined(report: DivergenceReport, first: int) -> Iterator[Difference | None]:
        """Yield the outputs of a report, whose first row is prompt number ``first``."""
        by_row = {divergence.row: divergence for divergence in report.divergences}
        for row in range(report.num_rows):
            if (d := by_row.get(row)) is None:
                yield None
            else:
                detail = f"{_tokens(d.stock_token, d.our_token)}, margin {d.margin:.3g}, noise {d.noise:.3g}"
                yield Difference(first + row, d.position, d.is_near_tie, detail)

    def speed(self, repeats: int) -> list[dict[str, Any]]:
        """Return figures of stock ``generate`` and ours with the user's config, see :func:`benchmark.summarize`.

        There are fewer repeats if there is no time for all, and no figures if there is none for one. Afterwards the
        model's end-of-sequence token no longer ends its outputs.
        """
        if not self.budget.allows(SPEED_OUTPUTS * self.new_tokens * self._token_s):
            return []
        self.show("measuring speed")
        bench = benchmark.Bench(
            self.pair.target, self.pair.draft, self.pair.tokenizer, self.texts, self.max_prompt_len,
            self.new_tokens, self.config, times_forwards=False, method=self.method,
        )  # fmt: skip
        runs = {benchmark.PLAIN: bench.stock(), benchmark.OURS: bench.ours(self.config, waits=False)}
        methods = [benchmark.Method(name, batch, run) for batch in (1, BATCH) for name, run in runs.items()]
        return benchmark.summarize(bench.run(methods, repeats, self.budget.allows), self.new_tokens)


def _tokens(stock: int, ours: int) -> str:
    return f"stock has token {stock}, hf_slospec {ours}"
