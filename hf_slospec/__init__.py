"""Lossless batched tree speculation for Hugging Face models, with a TPOT SLO per request."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_slospec.logs import install as install_last_resort
from hf_slospec.model.host_memory import limit_kernels

if TYPE_CHECKING:  # the names of :data:`_NAMES` again, for type checkers and editors
    from hf_slospec.batcher.generator import SLOSpecGenerator as SLOSpecGenerator
    from hf_slospec.batcher.handle import RequestHandle as RequestHandle
    from hf_slospec.batcher.handle import RequestResult as RequestResult
    from hf_slospec.batcher.stats import Percentiles as Percentiles
    from hf_slospec.batcher.stats import Stats as Stats
    from hf_slospec.cli.divergence import Divergence as Divergence
    from hf_slospec.cli.divergence import DivergenceReport as DivergenceReport
    from hf_slospec.cli.divergence import divergence_report as divergence_report
    from hf_slospec.config import SLOSpecConfig as SLOSpecConfig
    from hf_slospec.drafters.load_drafter import load_drafter as load_drafter
    from hf_slospec.drafters.methods import DraftMethod as DraftMethod
    from hf_slospec.drafters.past_answers import PastAnswers as PastAnswers
    from hf_slospec.engine.costs import StepCosts as StepCosts
    from hf_slospec.engine.events import PhaseTimes as PhaseTimes
    from hf_slospec.engine.events import RequestStep as RequestStep
    from hf_slospec.engine.events import StepEvent as StepEvent
    from hf_slospec.engine.events import write_chrome_trace as write_chrome_trace
    from hf_slospec.engine.interfaces import Drafter as Drafter
    from hf_slospec.engine.interfaces import Plan as Plan
    from hf_slospec.engine.interfaces import Policy as Policy
    from hf_slospec.engine.interfaces import Selection as Selection
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
    from hf_slospec.generate.call import SLOSpecOutput as SLOSpecOutput
    from hf_slospec.generate.enable import disable as disable
    from hf_slospec.generate.enable import enable as enable
    from hf_slospec.generate.enable import enabled as enabled
    from hf_slospec.generate.rollouts import RolloutCallback as RolloutCallback
    from hf_slospec.generate.rollouts import reuse_logprobs as reuse_logprobs
    from hf_slospec.generate.status import SpeculationStatus as SpeculationStatus
    from hf_slospec.generate.status import status as status
    from hf_slospec.model.memory import MemoryUse as MemoryUse
    from hf_slospec.model.version import weights_changed as weights_changed
    from hf_slospec.request.metrics import RequestMetrics as RequestMetrics
    from hf_slospec.request.params import RequestParams as RequestParams
    from hf_slospec.request.request import Request as Request
    from hf_slospec.request.slo import SLOStage as SLOStage
    from hf_slospec.request.state import Progress as Progress
    from hf_slospec.tiny.embedded import load_tiny_drafter as load_tiny_drafter
    from hf_slospec.tiny.embedded import load_tiny_pair as load_tiny_pair
    from hf_slospec.tiny.embedded import tiny_prompts as tiny_prompts
    from hf_slospec.training.retraining import HeadRetrainer as HeadRetrainer
    from hf_slospec.tree.tree import TokenTree as TokenTree

# Module -> the public names that it defines. A module is imported when one of its names is first
# used, so that ``import hf_slospec`` does not load torch.
_NAMES = {
    "batcher.generator": "SLOSpecGenerator",
    "batcher.handle": "RequestHandle RequestResult",
    "batcher.stats": "Percentiles Stats",
    "cli.divergence": "Divergence DivergenceReport divergence_report",
    "config": "SLOSpecConfig",
    "drafters.load_drafter": "load_drafter",
    "drafters.methods": "DraftMethod",
    "engine.costs": "StepCosts",
    "engine.events": "PhaseTimes RequestStep StepEvent write_chrome_trace",
    "engine.interfaces": "Drafter Plan Policy Selection",
    "errors": (
        "FallbackWarning IncompatibleDraftError InvalidInputError InvalidTypeError "
        "MissingExtraError NotGuaranteedError NotRunningError QueueFull "
        "RequestCancelledError SLOSpecError UnsupportedInputError UnsupportedModelError "
        "UnsupportedOptionError "
    ),
    "generate.call": "SLOSpecOutput",
    "generate.enable": "disable enable enabled",
    "generate.rollouts": "RolloutCallback reuse_logprobs",
    "generate.status": "SpeculationStatus status",
    "drafters.past_answers": "PastAnswers",
    "model.memory": "MemoryUse",
    "model.version": "weights_changed",
    "request.metrics": "RequestMetrics",
    "request.params": "RequestParams",
    "request.request": "Request",
    "request.slo": "SLOStage",
    "request.state": "Progress",
    "training.retraining": "HeadRetrainer",
    "tiny.embedded": "load_tiny_drafter load_tiny_pair tiny_prompts",
    "tree.tree": "TokenTree",
}
_HOMES = {
    name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()
}
__all__ = sorted(_HOMES)
__version__ = "0.1.0"

# oneDNN reads its cache limits at the first operation of the process, so they are set here, before
# torch computes anything.
limit_kernels()
install_last_resort()


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    """Return the module's attributes and all public names, imported or not."""
    return sorted({*globals(), *__all__})
