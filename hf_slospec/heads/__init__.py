"""Drafters for published heads (EAGLE-3, MTP, DFlash and others), Gemma 4 assistants, suffix trees,
and assistant models with another tokenizer.
"""

from __future__ import annotations

from hf_slospec.drafters import registry


def register() -> None:
    """Add this package's drafters, head formats and assistant kinds to the drafter registry."""
    from hf_slospec.drafters.head import HeadMethod
    from hf_slospec.heads.loading import FORMATS, load_mtp
    from hf_slospec.heads.shared_kv import gemma4_method
    from hf_slospec.heads.suffix import SuffixMethod
    from hf_slospec.heads.translated import translated_method

    registry.register(
        registry.NamedDrafter("suffix", lambda target, past: SuffixMethod(past), extra="suffix"),
        registry.NamedDrafter("mtp", lambda target, _: HeadMethod(load_mtp(target)), True),
        *FORMATS,
        registry.AssistantKind("Gemma 4 assistant", gemma4_method),
        registry.AssistantKind("assistant model with another tokenizer", translated_method),
    )
