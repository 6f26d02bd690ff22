"""``python -m hf_slospec gpu-check``: one command that says whether a GPU decodes rightly, and how fast."""

from hf_slospec.cli.gpu_check.environment import why_no_device
from hf_slospec.cli.gpu_check.phases import Plan, check, exit_code
from hf_slospec.cli.gpu_check.tables import tables

__all__ = ["Plan", "check", "exit_code", "tables", "why_no_device"]
