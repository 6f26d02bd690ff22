"""The GPU check: speed against stock ``generate``, identity with it, tests, and the memory floor."""

from benchmarks.gpu.contestants import ALL_METHODS, METHODS
from benchmarks.gpu.environment import why_no_device
from benchmarks.gpu.phases import check, exit_code
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.resuming import earlier_results
from benchmarks.gpu.tables import tables

__all__ = [
    "ALL_METHODS",
    "METHODS",
    "Plan",
    "check",
    "earlier_results",
    "exit_code",
    "tables",
    "why_no_device",
]
