"""Lossless batched tree speculation for Hugging Face models, with a speed target per request."""

from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.tree import TokenTree
from hf_slospec.divergence import Divergence, DivergenceReport, divergence_report
from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.events import PhaseTimes, RequestStep, StepEvent
from hf_slospec.engine.handle import RequestHandle, RequestResult
from hf_slospec.engine.protocols import Drafter, Plan, Policy, Selection
from hf_slospec.engine.request import Request, RequestMetrics
from hf_slospec.errors import (
    FallbackWarning,
    IncompatibleDraftError,
    InvalidInputError,
    InvalidTypeError,
    NotRunningError,
    QueueFull,
    RequestCancelledError,
    SLOSpecError,
    UnsupportedInputError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.generator import SLOSpecGenerator
from hf_slospec.hf import SLOSpecOutput, disable, enable
from hf_slospec.models.memory import MemoryUse
from hf_slospec.targets import SLOStage
from hf_slospec.telemetry import Percentiles, Stats
from hf_slospec.tiny import load_tiny_pair, tiny_prompts
from hf_slospec.trace import write_chrome_trace

__all__ = [
    "Divergence",
    "DivergenceReport",
    "Drafter",
    "FallbackWarning",
    "IncompatibleDraftError",
    "InvalidInputError",
    "InvalidTypeError",
    "MemoryUse",
    "NotRunningError",
    "Percentiles",
    "PhaseTimes",
    "Plan",
    "Policy",
    "QueueFull",
    "Request",
    "RequestCancelledError",
    "RequestHandle",
    "RequestMetrics",
    "RequestResult",
    "RequestStep",
    "SLOSpecConfig",
    "SLOSpecError",
    "SLOSpecGenerator",
    "SLOSpecOutput",
    "SLOStage",
    "Selection",
    "Stats",
    "StepCosts",
    "StepEvent",
    "TokenTree",
    "UnsupportedInputError",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "disable",
    "divergence_report",
    "enable",
    "load_tiny_pair",
    "tiny_prompts",
    "write_chrome_trace",
]
__version__ = "0.1.0"
