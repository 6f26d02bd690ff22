"""The GPU check: speed against stock ``generate``, identity with it, tests, and the memory floor."""

from hf_slospec.cli.gpu_check.environment import why_no_device
from hf_slospec.cli.gpu_check.phases import check, exit_code
from hf_slospec.cli.gpu_check.plan import Plan
from hf_slospec.cli.gpu_check.resuming import earlier_results
from hf_slospec.cli.gpu_check.tables import tables

__all__ = ["Plan", "check", "earlier_results", "exit_code", "tables", "why_no_device"]
