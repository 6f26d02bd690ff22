"""Schedulers: which requests a step decodes and which prompts it prefills."""

from typing import Literal

AdmissionName = Literal["slo", "edf", "fcfs", "priority"]
PrefillName = Literal["beside", "first", "chunked"]
