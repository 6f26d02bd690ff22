"""Simulation of serving with the real engine, schedulers and policies, and policies reimplemented
from papers.

Importing this package registers those policies; the entry point in pyproject.toml lets
``hf_slospec.policies`` import it when a config first names one of them."""

from hf_slospec.lab.comparison import Load, compare, draw, table
from hf_slospec.lab.hardware import HARDWARE, Hardware, HardwareFile
from hf_slospec.lab.policies.adaspec import AdaSpecPolicy
from hf_slospec.lab.policies.optimal import OptimalPolicy
from hf_slospec.lab.policies.sequoia import SequoiaPolicy, StaticTreePolicy
from hf_slospec.lab.policies.slos_serve import SLOsServePolicy
from hf_slospec.lab.policies.smartspec import SmartSpecPolicy, SmartSpecRequestsPolicy
from hf_slospec.lab.policies.smartspec_variants import (
    ConfidencePolicy,
    HeadsPolicy,
    TurboSpecPolicy,
)
from hf_slospec.lab.policies.thesis import CappedThesisSLOPolicy, ThesisPolicy, ThesisSLOPolicy
from hf_slospec.lab.policies.vllm_adaptive import VLLMAdaptivePolicy
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import config_of
from hf_slospec.lab.texts import Recording, TextModel
from hf_slospec.lab.workload import Job, gamma, jobs_of, mix_of, poisson
from hf_slospec.policies.registry import register

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

register(
    *(AdaSpecPolicy, OptimalPolicy, ThesisPolicy, ThesisSLOPolicy, CappedThesisSLOPolicy),
    *(SmartSpecPolicy, SmartSpecRequestsPolicy, ConfidencePolicy, HeadsPolicy, TurboSpecPolicy),
    *(SLOsServePolicy, SequoiaPolicy, StaticTreePolicy, VLLMAdaptivePolicy),
)
