"""Published drafting heads, suffix trees and translation between tokenizers."""

from __future__ import annotations

from typing import Any

from hf_slospec.drafters import registry


def _suffix(target: Any, past: Any) -> Any:
    from hf_slospec.heads.suffix import SuffixMethod

    return SuffixMethod(past)


def _mtp(target: Any, past: Any) -> Any:
    from hf_slospec.drafters.head import HeadMethod
    from hf_slospec.heads.loading import load_mtp

    return HeadMethod(load_mtp(target))


def register() -> None:
    """Add named drafters, head formats and kinds of assistant models."""
    from hf_slospec.heads.loading import FORMATS
    from hf_slospec.heads.shared_kv import gemma4_method
    from hf_slospec.heads.translated import translated_method

    registry.register(
        registry.NamedDrafter("suffix", _suffix),
        registry.NamedDrafter("mtp", _mtp, has_model=True),
        *FORMATS,
        registry.AssistantKind("Gemma 4 assistant", gemma4_method),
        registry.AssistantKind("assistant model with another tokenizer", translated_method),
    )
