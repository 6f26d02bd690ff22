"""Comparison of a user's checkpoint with stock ``generate``, for ``hf_slospec check``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from hf_slospec.batcher.generator import SLOSpecGenerator
from hf_slospec.cli.benchmark import encoded
from hf_slospec.cli.divergence import divergence_report, first_difference
from hf_slospec.cli.options import TimeBudget
from hf_slospec.config import SLOSpecConfig
from hf_slospec.drafters.methods import DraftMethod
from hf_slospec.errors import InvalidInputError, SLOSpecError
from hf_slospec.model.properties import trained_len
from hf_slospec.server.loading import Pair

EXACT = "exact"
NEAR_TIES = "near ties only"
WRONG = "WRONG"
REFUSED = "refused"
BATCH = 4  # rows of the left-padded batch, and requests of the batcher
# Drafts in every step: a policy that drafts nothing would compare plain decoding with itself.
ALWAYS_DRAFTS = {"policy": "fixed", "max_depth": 4, "max_width": 3}
MAX_SHOWN = 5  # differences that the report lists per kind of call

# (number of the first prompt, inputs of generate) -> differences
Compare = Callable[[int, dict[str, Any]], "list[Difference]"]


class Difference(NamedTuple):
    """The first new token of one output that differs from stock ``generate``'s output."""

    is_near_tie: bool | None  # None: not examined
    text: str


@dataclass
class Comparison:
    """Outputs of one kind of call, compared with those of stock ``generate``."""

    name: str
    total: int  # number of outputs
    num_compared: int = 0  # outputs that were compared before the time was over
    differences: list[Difference] = field(default_factory=list)
    refused: str | None = None  # reason, if the call was refused

    @property
    def verdict(self) -> str:
        """One of exact, near ties only, WRONG and refused; a difference that was not examined
        counts as a near tie.
        """
        if self.refused is not None:
            return REFUSED
        if any(difference.is_near_tie is False for difference in self.differences):
            return WRONG
        return NEAR_TIES if self.differences else EXACT

    def __str__(self) -> str:
        if self.refused is not None:
            return f"{REFUSED}: {self.refused}"
        num_equal = self.num_compared - len(self.differences)
        parts = [f"{self.verdict}, {num_equal} of {self.num_compared} outputs equal"]
        parts += [difference.text for difference in self.differences[:MAX_SHOWN]]
        if len(self.differences) > MAX_SHOWN:
            parts.append(f"and {len(self.differences) - MAX_SHOWN} more")
        if self.num_compared < self.total:
            parts.append(f"{self.total - self.num_compared} left out for lack of time")
        return "; ".join(parts)


def headline(comparisons: Sequence[Comparison]) -> str:
    """Return the worst verdict of the calls that were not refused, with the first wrong output; if
    all calls were refused, the reason.
    """
    verdicts = {comparison.verdict: comparison for comparison in reversed(comparisons)}
    verdict = next(verdict for verdict in (WRONG, NEAR_TIES, EXACT, REFUSED) if verdict in verdicts)
    first = verdicts[verdict]
    if verdict == WRONG:
        difference = next(each for each in first.differences if each.is_near_tie is False)
        return f"{WRONG}: {first.name}, {difference.text}"
    return str(first) if verdict == REFUSED else verdict


class ModelCheck:
    """Comparisons of one target's speculated calls with stock ``generate``; every step drafts a
    fixed tree.

    Args:
        pair: the models and the tokenizer.
        method: the draft method.
        texts: prompts, truncated to the target's positions; at least one is compared, more while
            there is time.
        new_tokens: maximum new tokens of every output.
        budget: time limit of all comparisons, which also prints the progress.
        image_inputs: processed prompts with images.

    Raises:
        UnsupportedModelError, IncompatibleDraftError: target or drafter cannot be used.
        InvalidInputError: the target has no positions for so many new tokens.
    """

    def __init__(
        self,
        pair: Pair,
        method: DraftMethod,
        texts: Sequence[str],
        new_tokens: int,
        config: SLOSpecConfig,
        budget: TimeBudget,
        image_inputs: Sequence[dict[str, Any]] = (),
    ):
        self.generator = SLOSpecGenerator(
            pair.target,
            None,
            pair.tokenizer,
            config.model_copy(update=ALWAYS_DRAFTS),
            drafter=method,
        )
        longest = trained_len(pair.target) or pair.tokenizer.model_max_length
        if new_tokens >= longest:
            raise InvalidInputError(
                f"--max-new-tokens {new_tokens} leaves no room for a prompt; the model has {longest} positions"
            )
        self.pair = pair
        self.texts = list(texts)
        self.new_tokens = new_tokens
        self.max_prompt_len = longest - new_tokens
        self.image_inputs = image_inputs
        self.budget = budget

    def comparisons(self) -> Iterator[Comparison]:
        """Compare all kinds of calls, one after another."""
        singles = [self._encoded([text]) for text in self.texts]
        batch = [self._encoded(self.texts[:BATCH])]
        yield self._compared("greedy, one by one", singles, self._examined, 0.3)
        yield self._compared(
            "sampled, one by one", singles, partial(self._unexamined, do_sample=True), 0.5
        )
        yield self._compared(f"greedy, left-padded batch of {BATCH}", batch, self._examined)
        yield self._compared("greedy, batcher", batch, self._submitted)
        if self.image_inputs:
            yield self._compared(
                "greedy, with images",
                self.image_inputs,
                partial(self._unexamined, do_sample=False),
                0.9,
            )

    def _encoded(self, texts: list[str]) -> dict[str, Any]:
        return encoded(self.pair.tokenizer, texts, self.max_prompt_len, self.pair.target.device)

    def _compared(
        self, name: str, calls: Sequence[dict[str, Any]], compare: Compare, share: float = 1.0
    ) -> Comparison:
        """Compare the first call, and further calls as long as the next one will probably end
        within ``share`` of the time budget.
        """
        self.budget.show(f"comparing: {name}")
        comparison = Comparison(name, sum(len(inputs["input_ids"]) for inputs in calls))
        last_s = 0.0
        for number, inputs in enumerate(calls, 1):
            if number > 1 and not self.budget.allows(last_s, share):
                break
            started_s = self.budget.elapsed_s
            try:
                comparison.differences += compare(number, inputs)
            except SLOSpecError as error:
                comparison.refused = " ".join(str(error).split())
                break
            comparison.num_compared += len(inputs["input_ids"])
            last_s = self.budget.elapsed_s - started_s
        return comparison

    def _examined(self, first: int, inputs: dict[str, Any], **options: Any) -> list[Difference]:
        """Return the divergences of a greedy call from stock, as :func:`divergence_report` finds
        them; ``first`` is the number of the first row's prompt.
        """
        report = divergence_report(
            self.generator, inputs, do_sample=False, max_new_tokens=self.new_tokens, **options
        )
        return [
            Difference(d.is_near_tie, f"prompt {first + d.row}, {d}") for d in report.divergences
        ]

    def _submitted(self, first: int, inputs: dict[str, Any]) -> list[Difference]:
        """Return the divergences of requests in the batcher from the padded batch of stock."""
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": self.new_tokens}
        rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
        with self.generator:
            handles = [
                self.generator.submit(ids[mask].tolist(), block=True, **options)
                for ids, mask in rows
            ]
            ours = [handle.result().token_ids for handle in handles]
        return self._examined(first, inputs, our_tokens=ours)

    def _unexamined(self, number: int, inputs: dict[str, Any], do_sample: bool) -> list[Difference]:
        """Return the first difference of one output of a call that :func:`divergence_report` cannot
        examine, such as a sampled one.

        In fp32 it counts as wrong. In other dtypes it is not examined: rounding may decide.
        """
        target: Any = self.pair.target
        new = []
        for generate in (target.generate, self.generator.generate):
            torch.manual_seed(number)
            sequences = generate(**inputs, do_sample=do_sample, max_new_tokens=self.new_tokens)
            new.append(sequences[0, inputs["input_ids"].shape[1] :].tolist())
        if (position := first_difference(*new)) is None:
            return []
        stock, ours = (tokens[position : position + 1] for tokens in new)  # empty after the end
        is_wrong = target.dtype == torch.float32
        text = f"prompt {number}, new token {position}: stock has {stock}, hf_slospec {ours}"
        return [
            Difference(
                False if is_wrong else None,
                f"{text} ({'not a near tie' if is_wrong else 'not examined'})",
            )
        ]
