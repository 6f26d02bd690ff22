"""Lossless batched tree speculation for Hugging Face models, with a TPOT SLO per request."""

from hf_slospec.algo.tree import TokenTree
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.chrome_trace import write_chrome_trace
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes, RequestStep, StepEvent
from hf_slospec.engine.protocols import Drafter, Plan, Policy, Selection
from hf_slospec.engine.request import Progress, Request, RequestMetrics
from hf_slospec.errors import (
    FallbackWarning,
    IncompatibleDraftError,
    InvalidInputError,
    InvalidTypeError,
    NotGuaranteedError,
    NotRunningError,
    QueueFull,
    RequestCancelledError,
    SLOSpecError,
    UnsupportedInputError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.generate.decode import SLOSpecOutput
from hf_slospec.generate.divergence import Divergence, DivergenceReport, divergence_report
from hf_slospec.generate.enable import disable, enable
from hf_slospec.generate.load_drafter import load_drafter
from hf_slospec.generate.slo import SLOStage
from hf_slospec.models.cpu.memory import limit_kernels
from hf_slospec.models.drafters.methods import DraftMethod
from hf_slospec.models.memory import MemoryUse
from hf_slospec.models.weights_version import weights_changed
from hf_slospec.serving.generator import SLOSpecGenerator
from hf_slospec.serving.handle import RequestHandle, RequestResult
from hf_slospec.serving.telemetry import Percentiles, Stats
from hf_slospec.tiny.embedded import load_tiny_drafter, load_tiny_pair, tiny_prompts

__all__ = [
    "Divergence",
    "DivergenceReport",
    "DraftMethod",
    "Drafter",
    "FallbackWarning",
    "IncompatibleDraftError",
    "InvalidInputError",
    "InvalidTypeError",
    "MemoryUse",
    "NotGuaranteedError",
    "NotRunningError",
    "Percentiles",
    "PhaseTimes",
    "Plan",
    "Policy",
    "Progress",
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
    "load_drafter",
    "load_tiny_drafter",
    "load_tiny_pair",
    "tiny_prompts",
    "weights_changed",
    "write_chrome_trace",
]
__version__ = "0.1.0"

limit_kernels()
