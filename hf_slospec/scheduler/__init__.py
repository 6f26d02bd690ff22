"""Schedulers, which choose the requests that a step decodes and the prompts that it prefills."""

from typing import Literal

AdmissionName = Literal["slo", "edf", "fcfs", "priority"]
PrefillName = Literal["beside", "first", "chunked"]
