"""Logits, scores and log probabilities of committed tokens, as calls return them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class TokenLogprobs(NamedTuple):
    """Log probabilities of a committed token and of the most probable tokens at its position,
    before logits processors unless ``Record.is_processed`` or ``Record.temperature`` was set.
    """

    logprob: float
    top: list[tuple[int, float]]  # (token, log probability), most probable first


class Record:
    """Recorder of logits, processed scores and log probabilities of committed tokens, as far as
    requested.
    """

    def __init__(self, num_rows: int, config: Any):
        wanted = {"logits": config.output_logits, "scores": config.output_scores}
        # "logits" or "scores" -> by row, by position: [vocab].
        self._rows: dict[str, list[list[torch.Tensor]]] = {
            name: [[] for _ in range(num_rows)]
            for name, is_wanted in wanted.items()
            if is_wanted and config.return_dict_in_generate
        }
        # Number of most probable tokens to record per position; None: record no log probabilities.
        self.num_top: int | None = None
        self.is_processed = False  # log probabilities are those after logits processors
        # Log probabilities are those of the logits divided by this, before other processors.
        self.temperature: float | None = None
        self.logprobs: list[list[TokenLogprobs]] = [[] for _ in range(num_rows)]

    @property
    def is_wanted(self) -> bool:
        """Return whether anything is recorded."""
        return bool(self._rows) or self.num_top is not None

    def add(self, row: int, logits: torch.Tensor, scores: torch.Tensor, token: int) -> None:
        """Record a row's next committed token with its logits and scores, both [vocab]."""
        values = {"logits": logits, "scores": scores}
        for name, rows in self._rows.items():
            rows[row].append(values[name].clone())  # a view would keep the logits of all nodes
        if self.num_top is not None:
            read = scores if self.is_processed else logits
            if self.temperature is not None:
                read = logits / self.temperature
            logprobs = read.log_softmax(-1)
            top = logprobs.topk(min(self.num_top, len(logprobs)))
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            self.logprobs[row].append(TokenLogprobs(float(logprobs[token]), list(pairs)))

    def unshared(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits that processors may write into; a copy if log probabilities are
        recorded.
        """
        return logits if self.num_top is None else logits.clone()

    def scores_of(self, row: int) -> tuple[torch.Tensor, ...] | None:
        """Return a row's scores so far for stopping criteria: one [1, vocab] tensor per position."""
        rows = self._rows.get("scores")
        return None if rows is None else tuple(scores[None] for scores in rows[row])

    def outputs(self, num_positions: int) -> dict[str, tuple[torch.Tensor, ...] | None]:
        """Return ``logits`` and ``scores`` as ``generate`` does: one [batch, vocab] tensor per
        position; None if not recorded.
        """
        outputs: dict[str, tuple[torch.Tensor, ...] | None] = dict.fromkeys(("logits", "scores"))
        for name, rows in self._rows.items():
            columns = zip(*(row[:num_positions] for row in rows), strict=True)
            outputs[name] = tuple(map(torch.stack, columns))
        return outputs
