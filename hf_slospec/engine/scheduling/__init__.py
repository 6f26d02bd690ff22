"""Schedulers: which requests a step decodes and which prompts it prefills."""

from __future__ import annotations

from typing import Literal, Protocol

AdmissionName = Literal["slo", "edf", "fcfs", "priority"]
PrefillName = Literal["beside", "first", "chunked"]


class LimitSettings(Protocol):
    """Settings that bound a continuous scheduler, see :class:`~hf_slospec.SLOSpecConfig`."""

    @property
    def max_batch(self) -> int:
        """Maximum number of running requests."""

    @property
    def prefill_chunk(self) -> int:
        """Maximum prefill tokens of one step."""

    @property
    def starvation_s(self) -> float:
        """Seconds after which a waiting request without a guarantee precedes all others."""
