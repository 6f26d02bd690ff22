"""Schedulers, which choose the requests that a step decodes and the prompts that it prefills; the
engine's scheduler is in ``continuous.py``.
"""

from typing import Literal

AdmissionName = Literal["slo", "edf", "fcfs", "priority"]
PrefillName = Literal["beside", "first", "chunked"]
