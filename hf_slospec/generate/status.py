"""``status``, which tells what speculation does for a model, and has done so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_slospec.errors import SLOSpecError
from hf_slospec.generate.call import Decoder, Done
from hf_slospec.generate.enable import decoder_of
from hf_slospec.model.loading import check_causal_lm
from hf_slospec.model.machine import size_and_place, weight_formats
from hf_slospec.model.memory import MemoryUse
from hf_slospec.request.tables import PrintsAsTable, shown


@dataclass(frozen=True, repr=False)
class SpeculationStatus(PrintsAsTable):
    """State of speculation of a model; prints as a table."""

    _has_header = False

    model: str  # class, size, dtype and device
    weights: str  # number of matrices in each dtype or quantised format
    enabled: str  # which calls are speculated, or why none is
    drafter: str | None = None  # kind of drafting method; None: not enabled, as for those below
    policy: str | None = None
    # How the forwards of "target" and "draft" are computed: compiled, cuda_graphs, or
    # eager with the reason.
    forwards: dict[str, str] | None = None
    attention: str | None = None  # attention backend of eager forwards
    exactness: str | None = None  # how outputs compare with those of stock generate
    memory: MemoryUse | None = None  # bytes in addition to the weights
    done: Done | None = None  # counts of all calls and submitted requests so far

    def _table(self) -> list[tuple[str, str]]:
        cells = dict(vars(self))
        if self.forwards is not None:
            cells["forwards"] = "; ".join(f"{name}: {how}" for name, how in self.forwards.items())
        if self.memory is not None:
            cells["memory"] = ", ".join(
                f"{name} {size / 2**20:.1f} MiB"
                for name, size in self.memory
                if name != "rounded_weights" and size
            )
        if (done := self.done) is not None:
            cells["done"] = (
                f"{done.rows} rows, {done.tokens} tokens in {done.steps} steps "
                f"({shown(done.tokens_per_step, 2)} per step), {done.accepted} of {done.drafted} "
                "drafted tokens accepted"
            )
        return [(name, str(cell) or "none") for name, cell in cells.items() if cell is not None]


def status(model: Any) -> SpeculationStatus:
    """Return what speculation does for a model at present, and what it has done so far.

    Args:
        model: a model, enabled or not, or a :class:`SLOSpecGenerator`.

    Raises:
        InvalidTypeError: ``model`` is neither.
    """
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, Decoder):
        decoder = decoder_of(model)
        if decoder is not None and decoder.model is not check_causal_lm("model", model):
            decoder = None  # the model is a deep copy of the enabled one
    described = model if decoder is None else decoder.model
    facts = f"{type(described).__name__}, {size_and_place(described)}", weight_formats(described)
    if decoder is None:
        return SpeculationStatus(*facts, "no; call hf_slospec.enable(model)")
    try:
        speculator = decoder.speculator
    except SLOSpecError as error:  # enabled with fallback=True, and refused
        return SpeculationStatus(*facts, f"stock generate runs: {error}")
    return SpeculationStatus(
        *facts,
        decoder.scope,
        drafter=speculator.method.kind,
        policy=_policy_of(decoder),
        forwards=speculator.forwards,
        attention=speculator.target.packed.backend.__name__,
        exactness=_exactness(decoder.config.exact, decoder.model.dtype),
        memory=speculator.memory(0),
        done=decoder.done,
    )


def _policy_of(decoder: Decoder) -> str:
    own = decoder.make_policy
    name = decoder.config.policy if own is None else getattr(own, "__name__", repr(own))
    batcher = decoder.batcher_config
    return name if batcher is None else f"{name}; {batcher.policy} for submitted requests"


def _exactness(exact: str | None, dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if exact == "bits":
        return "bit for bit stock generate's"
    if exact == "self":
        return "the same bits for a request in every batch; stock generate may differ at near-ties"
    if dtype in (torch.float32, torch.float64):
        return "tokens equal stock generate's"
    return f"tokens may differ from stock generate's at near-ties of {name}"
