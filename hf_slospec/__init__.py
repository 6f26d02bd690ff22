"""Lossless batched tree speculation for Hugging Face models, with a TPOT SLO per request."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_slospec.models.device.host_memory import limit_kernels

if TYPE_CHECKING:  # as :data:`_NAMES`, for type checkers and editors
    from hf_slospec.algo.tree import TokenTree as TokenTree
    from hf_slospec.config import SLOSpecConfig as SLOSpecConfig
    from hf_slospec.drafters.load_drafter import load_drafter as load_drafter
    from hf_slospec.drafters.methods import DraftMethod as DraftMethod
    from hf_slospec.drafters.past_answers import PastAnswers as PastAnswers
    from hf_slospec.engine.chrome_trace import write_chrome_trace as write_chrome_trace
    from hf_slospec.engine.events import PhaseTimes as PhaseTimes
    from hf_slospec.engine.events import RequestStep as RequestStep
    from hf_slospec.engine.events import StepEvent as StepEvent
    from hf_slospec.engine.protocols import Drafter as Drafter
    from hf_slospec.engine.protocols import Plan as Plan
    from hf_slospec.engine.protocols import Policy as Policy
    from hf_slospec.engine.protocols import Selection as Selection
    from hf_slospec.engine.request import Progress as Progress
    from hf_slospec.engine.request import Request as Request
    from hf_slospec.engine.request import RequestMetrics as RequestMetrics
    from hf_slospec.engine.request import RequestParams as RequestParams
    from hf_slospec.engine.step_times import StepCosts as StepCosts
    from hf_slospec.errors import FallbackWarning as FallbackWarning
    from hf_slospec.errors import IncompatibleDraftError as IncompatibleDraftError
    from hf_slospec.errors import InvalidInputError as InvalidInputError
    from hf_slospec.errors import InvalidTypeError as InvalidTypeError
    from hf_slospec.errors import MissingExtraError as MissingExtraError
    from hf_slospec.errors import NotGuaranteedError as NotGuaranteedError
    from hf_slospec.errors import NotRunningError as NotRunningError
    from hf_slospec.errors import QueueFull as QueueFull
    from hf_slospec.errors import RequestCancelledError as RequestCancelledError
    from hf_slospec.errors import SLOSpecError as SLOSpecError
    from hf_slospec.errors import UnsupportedInputError as UnsupportedInputError
    from hf_slospec.errors import UnsupportedModelError as UnsupportedModelError
    from hf_slospec.errors import UnsupportedOptionError as UnsupportedOptionError
    from hf_slospec.generate.decode import SLOSpecOutput as SLOSpecOutput
    from hf_slospec.generate.divergence import Divergence as Divergence
    from hf_slospec.generate.divergence import DivergenceReport as DivergenceReport
    from hf_slospec.generate.divergence import divergence_report as divergence_report
    from hf_slospec.generate.enable import disable as disable
    from hf_slospec.generate.enable import enable as enable
    from hf_slospec.generate.rollouts import RolloutCallback as RolloutCallback
    from hf_slospec.generate.slo import SLOStage as SLOStage
    from hf_slospec.models.device.memory import MemoryUse as MemoryUse
    from hf_slospec.models.inspection.weights_version import weights_changed as weights_changed
    from hf_slospec.serving.generator import SLOSpecGenerator as SLOSpecGenerator
    from hf_slospec.serving.handle import RequestHandle as RequestHandle
    from hf_slospec.serving.handle import RequestResult as RequestResult
    from hf_slospec.serving.telemetry import Percentiles as Percentiles
    from hf_slospec.serving.telemetry import Stats as Stats
    from hf_slospec.tiny.embedded import load_tiny_drafter as load_tiny_drafter
    from hf_slospec.tiny.embedded import load_tiny_pair as load_tiny_pair
    from hf_slospec.tiny.embedded import tiny_prompts as tiny_prompts

# Names by the module that is imported when one of them is first used: the import of the package loads no torch.
_NAMES = {
    "algo.tree": "TokenTree",
    "config": "SLOSpecConfig",
    "engine.chrome_trace": "write_chrome_trace",
    "engine.step_times": "StepCosts",
    "engine.events": "PhaseTimes RequestStep StepEvent",
    "engine.protocols": "Drafter Plan Policy Selection",
    "engine.request": "Progress Request RequestMetrics RequestParams",
    "errors": (
        "FallbackWarning IncompatibleDraftError InvalidInputError InvalidTypeError MissingExtraError "
        "NotGuaranteedError NotRunningError QueueFull RequestCancelledError SLOSpecError "
        "UnsupportedInputError UnsupportedModelError UnsupportedOptionError"
    ),
    "generate.decode": "SLOSpecOutput",
    "generate.divergence": "Divergence DivergenceReport divergence_report",
    "generate.enable": "disable enable",
    "generate.rollouts": "RolloutCallback",
    "generate.slo": "SLOStage",
    "drafters.load_drafter": "load_drafter",
    "drafters.methods": "DraftMethod",
    "drafters.past_answers": "PastAnswers",
    "models.device.memory": "MemoryUse",
    "models.inspection.weights_version": "weights_changed",
    "serving.generator": "SLOSpecGenerator",
    "serving.handle": "RequestHandle RequestResult",
    "serving.telemetry": "Percentiles Stats",
    "tiny.embedded": "load_tiny_drafter load_tiny_pair tiny_prompts",
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)
__version__ = "0.1.0"

limit_kernels()  # before torch computes anything, also for the user


def __getattr__(name: str) -> Any:
    """Import a public name where it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    """Return the public names, whether they have been used or not."""
    return sorted({*globals(), *__all__})
