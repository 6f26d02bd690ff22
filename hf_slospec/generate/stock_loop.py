"""Stock decoding of batches whose rows depend on each other, by processors or criteria that see the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.protocols import Clock
from hf_slospec.engine.request import Request
from hf_slospec.generate.callbacks import is_stock
from hf_slospec.generate.rows import Rows, is_joint


def batch_level_names(processors: LogitsProcessorList, criteria: StoppingCriteriaList, num_rows: int) -> list[str]:
    """Return the names of processors and criteria that are not known to treat each row by itself.

    Those of transformers do, and joint criteria are known. A user's declare it by an attribute ``per_row = True``;
    without it they may tell rows apart, end all of them together or count their calls, and stock calls them once per
    step with the whole batch.
    """
    users = [each for each in (*processors, *criteria) if not is_stock(each)]
    return [
        type(each).__name__ for each in users if not getattr(each, "per_row", False) and not is_joint(each, num_rows)
    ]


def run_stock_loop(
    model: PreTrainedModel,
    rows: Rows,
    clock: Clock,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> Any:
    """Decode with stock's loop, one token of every row at a time, and record the times on the requests."""
    rows.begin()
    watch = _TokenTimes(clock)
    loop: Any = type(model)
    output = loop._sample(
        model,
        rows.input_ids,
        logits_processor=processors,
        stopping_criteria=StoppingCriteriaList([*criteria, watch]),
        generation_config=config,
        streamer=rows.streamer,
        **model_kwargs,
    )
    sequences = getattr(output, "sequences", output)[:, rows.input_ids.shape[1] :].tolist()
    for request, new in zip(rows.requests, sequences, strict=True):
        _record(request, new[: rows.length_of(new)], watch.times_s)
    return output


def _record(request: Request, new: list[int], times_s: list[float]) -> None:
    for token, now_s in zip(new, times_s, strict=False):
        request.tokens.append(token)
        request.record_step(0, 0, 1.0, PhaseTimes(), now_s)
    request.finish_reason = "stop" if request.num_left > 0 else "length"


class _TokenTimes(StoppingCriteria):
    """Criterion that never stops, and records when each step's tokens were chosen."""

    def __init__(self, clock: Clock):
        self.clock, self.times_s = clock, list[float]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times_s.append(self.clock())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
