"""A stand-in for CUDA graphs: replays operators with all host-side values frozen at capture."""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_slospec.cuda.flash import Entries
from hf_slospec.model.batch import AttentionRules
from hf_slospec.model.transfer import map_tensors
from tests.support.stand_ins.flash import StandIn

# Of arguments that hold no tensors, those that are frequent.
PLAIN = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def each(tree, function):
    """Of arguments and results of operators; torch's own takes several times as long."""
    kind = type(tree)
    if kind in PLAIN:
        return tree
    if kind is list or kind is tuple:
        return kind([each(part, function) for part in tree])
    if kind is dict:
        return {name: each(part, function) for name, part in tree.items()}
    return function(tree) if isinstance(tree, torch.Tensor) else tree


def tensors_in(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    found = []
    each(tree, found.append)
    return found


class Tape(TorchDispatchMode):
    """Writes down which operators are called, and with what."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.is_broken = False  # by what cannot be captured

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append(
            (func, args, kwargs or {}, out)
        )  # keeps all tensors, so that none gets another's id
        return out

    def play(self, result):
        """Call all of it again: on tensors made by calls as they are made now, on all others where
        they are.
        """
        made = {}

        def now(tensor):
            return made.get(id(tensor), tensor)

        for func, args, kwargs, out in self.calls:
            again = func(*each(args, now), **each(kwargs, now))
            for before, after in zip(tensors_in(out), tensors_in(again), strict=True):
                made[id(before)] = after
        return map_tensors(result, now)


class Tapes:
    """Makes them, in the place of graphs."""

    max_bytes = 2**40
    num_bytes = 0

    def __init__(self):
        self.num_captured = self.num_replayed = 0

    def on_stream(self):
        return contextlib.nullcontext()

    def capture(self, run):
        with Tape() as tape:
            result = run()
        self.num_captured += 1

        def replay():
            self.num_replayed += 1
            return tape.play(result)

        return replay

    def is_usable(self):
        return True


class OpaqueStandIn(StandIn):
    """One operator to whoever traces it, as a flash-attention kernel is."""

    def __call__(self, query, key, value, entries, is_causal, rules):
        self.calls.append((is_causal, entries.max_queries, query.shape[1] // key.shape[1]))
        cumulative = entries.cu_queries, entries.cu_keys
        most = entries.max_queries, entries.max_keys
        return _kernel(
            query,
            key,
            value,
            entries.token_indices,
            *cumulative,
            *most,
            rules.scaling,
            is_causal,
            rules.window,
            rules.softcap,
        )


@torch.library.custom_op("hf_slospec_tests::flash_stand_in", mutates_args=())
def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    max_queries: int,
    max_keys: int,
    scaling: float,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    entries = Entries(rows, cu_queries, cu_keys, max_queries, max_keys)
    kernel = StandIn(query.device)
    return kernel(query, key, value, entries, is_causal, AttentionRules(scaling, window, softcap))
