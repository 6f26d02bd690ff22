"""Simulation of serving: the real engine, schedulers and policies on simulated models and a virtual clock."""

from hf_slospec.sim.comparison import Load, compare, draw, table
from hf_slospec.sim.hardware import HARDWARE, Hardware, HardwareFile
from hf_slospec.sim.simulation import Simulation
from hf_slospec.sim.systems import config_of
from hf_slospec.sim.texts import Recording, TextModel
from hf_slospec.sim.workload import Job, gamma, jobs_of, mix_of, poisson

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
