"""Comparison of outputs with stock ``generate``: identical but for ties, within 1e-4 in fp32 and
rounding in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.failures import outcome_of, release_memory
from benchmarks.gpu.limits import TimedOutError, at_most
from benchmarks.gpu.resuming import is_done
from benchmarks.gpu.variants import VARIANTS
from hf_slospec.batcher.generator import SLOSpecGenerator
from hf_slospec.cli.divergence import DivergenceReport, divergence_report
from hf_slospec.config import SLOSpecConfig
from hf_slospec.server.loading import Pair, load_pair
from hf_slospec.tiny.embedded import tiny_prompts

BATCH = 4
# Difference of two logits in fp32: cuBLAS picks its kernels, and with them its rounding, by the
# number of tokens.
TIE = 1e-4
RULES = {"float32": f"equal but for ties below {TIE:g} in logits", "bfloat16": "near-ties only"}


def identity(
    device: torch.device,
    size: str,
    new_tokens: int,
    budget: Budget,
    earlier: Sequence[dict[str, Any]],
    on_hang: Callable[[], None],
) -> Iterator[dict[str, Any]]:
    """Yield one record per dtype and variant; ``earlier``: records of an earlier run; ``on_hang``:
    see `at_most`.
    """
    done = {(record["dtype"], record["name"]): record for record in earlier if is_done(record)}
    for dtype, rule in RULES.items():
        pair: Pair | None = None
        for name, config in VARIANTS.items():
            record: dict[str, Any] = {
                "dtype": dtype,
                "size": size,
                "batch": BATCH,
                "name": name,
                "rule": rule,
            }
            if (dtype, name) in done:
                yield done[dtype, name]
                continue
            if budget.left_s <= 0:
                yield record | {"status": "skipped", "reason": "no time was left"}
                continue
            try:
                with at_most(budget.left_s, on_hang):
                    pair = pair or load_pair(None, None, size, dtype, str(device))
                    report = _report(pair, config, new_tokens)
            except TimedOutError as error:
                yield record | {"status": "timed out", "reason": str(error)}
                continue
            except Exception as error:  # noqa: BLE001  recorded
                yield record | outcome_of(error)
                continue
            near = sum(divergence.is_near_tie for divergence in report.divergences)
            margins = [divergence.margin for divergence in report.divergences]
            is_right = (
                all(margin < TIE for margin in margins)
                if dtype == "float32"
                else report.all_near_ties
            )
            yield record | {
                "status": "passed" if is_right else "failed",
                "tokens": report.num_tokens,
                "divergences": len(report.divergences),
                "near_ties": near,
                "largest_margin": max(margins, default=None),
                "report": str(report).splitlines() if report.divergences else [],
            }
        del pair
        release_memory()


def _report(pair: Pair, config: SLOSpecConfig, new_tokens: int) -> DivergenceReport:
    texts = tiny_prompts()[:BATCH]
    inputs = pair.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(
        pair.target.device
    )
    inputs.pop("token_type_ids", None)
    return divergence_report(
        SLOSpecGenerator(*pair, config), dict(inputs), do_sample=False, max_new_tokens=new_tokens
    )
