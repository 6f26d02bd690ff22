"""The GPU check: tests, identity with stock ``generate``, speed, and the memory floor."""

from hf_slospec.cli.gpu_check.environment import why_no_device
from hf_slospec.cli.gpu_check.phases import Plan, check, exit_code
from hf_slospec.cli.gpu_check.tables import tables

__all__ = ["Plan", "check", "exit_code", "tables", "why_no_device"]
