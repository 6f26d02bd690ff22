"""Simulation of serving: the real engine, schedulers and policies on simulated models and a virtual clock."""

from hf_slospec.lab.comparison import Load, compare, draw, table
from hf_slospec.lab.hardware import HARDWARE, Hardware, HardwareFile
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import config_of
from hf_slospec.lab.texts import Recording, TextModel
from hf_slospec.lab.workload import Job, gamma, jobs_of, mix_of, poisson

__all__ = [
    "HARDWARE",
    "Hardware",
    "HardwareFile",
    "Job",
    "Load",
    "Recording",
    "Simulation",
    "TextModel",
    "compare",
    "config_of",
    "draw",
    "gamma",
    "jobs_of",
    "mix_of",
    "poisson",
    "table",
]
