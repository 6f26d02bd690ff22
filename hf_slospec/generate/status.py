"""``status``, which tells what speculation does for a model, and has done so far."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from hf_slospec.errors import SLOSpecError
from hf_slospec.generate.call import Decoder, Done
from hf_slospec.generate.enable import decoder_of
from hf_slospec.model.machine import size_and_place
from hf_slospec.model.memory import MemoryUse
from hf_slospec.request.tables import html_table, shown, text_table

DISABLED = "no; call hf_slospec.enable(model)"


@dataclass(frozen=True, repr=False)
class SpeculationStatus:
    """State of speculation of a model; prints as a table."""

    model: str  # class, size, dtype and device
    enabled: str  # which calls are speculated, or why none is
    drafter: str | None  # kind of drafting method; None: not enabled, as for the fields below
    policy: str | None
    # How the forwards of "target" and "draft" are computed: compiled, cuda_graphs, or eager and why.
    forwards: dict[str, str] | None
    attention: str | None  # attention backend of eager forwards
    exactness: str | None  # how outputs compare with those of stock generate
    memory: MemoryUse | None  # bytes in addition to the weights
    done: Done | None  # counts of all calls and submitted requests so far

    def _table(self) -> list[tuple[str, str]]:
        cells = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.forwards is not None:
            cells["forwards"] = "; ".join(f"{name}: {how}" for name, how in self.forwards.items())
        if self.memory is not None:
            sizes = {
                name: size / 2**20
                for name, size in self.memory
                if name != "rounded_weights" and size
            }
            cells["memory"] = ", ".join(f"{name} {size:.1f} MiB" for name, size in sizes.items())
        if (done := self.done) is not None:
            cells["done"] = (
                f"{done.rows} rows, {done.tokens} tokens in {done.steps} steps "
                f"({shown(done.tokens_per_step, 2)} per step), {done.accepted} of {done.drafted} "
                "drafted tokens accepted"
            )
        return [(name, str(cell) or "none") for name, cell in cells.items() if cell is not None]

    def __repr__(self) -> str:
        return text_table(self._table(), to_right=False)

    def _repr_html_(self) -> str:
        return html_table(self._table(), has_header=False)


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
        if decoder is None:
            return SpeculationStatus(_described(model), DISABLED, *[None] * 7)
    try:
        speculator = decoder.speculator
    except SLOSpecError as error:  # enabled with fallback=True, and refused
        return SpeculationStatus(
            _described(decoder.model), f"stock generate runs: {error}", *[None] * 7
        )
    config = decoder.config
    return SpeculationStatus(
        model=_described(decoder.model),
        enabled=decoder.scope,
        drafter=speculator.method.kind,
        policy=_policy_of(decoder),
        forwards=speculator.forwards,
        attention=speculator.target.packed.backend.__name__,
        exactness=_exactness(config.exact, decoder.model.dtype),
        memory=speculator.memory(0),
        done=decoder.done,
    )


def _described(model: Any) -> str:
    return f"{type(model).__name__}, {size_and_place(model)}"


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
