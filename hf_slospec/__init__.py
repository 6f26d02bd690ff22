"""Lossless batched tree speculation for Hugging Face models, with a speed target per request."""

from hf_slospec.engine.config import SLOSpecConfig
from hf_slospec.engine.request import RequestMetrics
from hf_slospec.errors import (
    IncompatibleDraftError,
    InvalidInputError,
    InvalidTypeError,
    SLOSpecError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.generator import SLOSpecGenerator
from hf_slospec.hf import SLOSpecOutput, disable, enable
from hf_slospec.tiny import load_tiny_pair, tiny_prompts

__all__ = [
    "IncompatibleDraftError",
    "InvalidInputError",
    "InvalidTypeError",
    "RequestMetrics",
    "SLOSpecConfig",
    "SLOSpecError",
    "SLOSpecGenerator",
    "SLOSpecOutput",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "disable",
    "enable",
    "load_tiny_pair",
    "tiny_prompts",
]
__version__ = "0.1.0"
