"""Batched tree speculation for ``model.generate(custom_generate=...)``; transformers loads and
calls ``generate``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_slospec import SLOSpecGenerator

# Attribute of the model: measured costs and learned acceptance serve its next call
KEPT = "_hf_slospec_generate"


def generate(
    inputs: Any = None,
    generation_config: Any = None,
    *,
    model: Any,
    slo_tpot: Any = None,
    drafter: Any = None,
    fallback: bool = False,
    **arguments: Any,
) -> Any:
    """Return what ``model.generate`` returns for the same arguments, decoded by tree speculation.

    Args:
        inputs, generation_config, arguments: as stock ``generate`` takes them; with
            ``assistant_model``, any batch.
        model: the target.
        slo_tpot: seconds per output token for all rows, or a list with one entry (or None) per row;
            None: no SLO.
        drafter: what drafts without an assistant model, as ``hf_slospec.enable`` takes it; None:
            prompt lookup.
        fallback: run stock ``generate``, with a warning, where the model or an option cannot be
            speculated.
    """
    kept: Any = model.__dict__.get(KEPT)
    if kept is None or kept.of != (
        model,
        drafter,
    ):  # a deep copy of a model has the attribute of its original
        kept = model.__dict__[KEPT] = _generate_of(model, drafter, fallback)
    given = {name: value for name, value in arguments.items() if value is not None}
    return kept(inputs, generation_config, slo_tpot=slo_tpot, fallback=fallback, **given)


vars(generate)["speculates"] = (
    True  # so that hf_slospec does not take it for a way to decode that it would skip
)


def _generate_of(model: Any, drafter: Any, fallback: bool) -> Callable[..., Any]:
    generator = SLOSpecGenerator(model, drafter=drafter, fallback=fallback)

    def generate_of_model(
        *args: Any, **kwargs: Any
    ) -> Any:  # a function, since these are not copied with the model
        return generator.generate(*args, **kwargs)

    vars(generate_of_model)["of"] = model, drafter
    return generate_of_model
