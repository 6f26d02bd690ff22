"""Reach of transformers' mask functions: whether a token sees all keys before it, a window of them or its chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

FAR = 1 << 20  # positions; in place of the size where a mask has no window or chunk


class Reach(NamedTuple):
    """Limits of causal attention, in positions; None: no limit."""

    window: int | None = None
    chunk: int | None = None


class _OnHost(TorchDispatchMode):
    """Context in which operators compute on the host: on a GPU, an index beyond a tensor ends the process's context."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_host = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), (args, kwargs or {}))
        cpu_args, cpu_kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), on_host)
        return func(*cpu_args, **cpu_kwargs)


def reach_of(mask_function: Callable[..., torch.Tensor], local_size: int | None) -> Reach | None:
    """Return the reach of a mask, read from its values where windows and chunks of this size differ.

    Args:
        mask_function: one of transformers.masking_utils, of broadcasting indices of rows, heads, queries and keys.
        local_size: window or chunk in positions, None if the mask has none.

    Returns:
        None if the mask is neither causal, nor a sliding window, nor chunked.
    """
    size = local_size or FAR
    near = sorted({0, 1, 2, *(n * size + step for n in (1, 2, 3) for step in (-1, 0, 1))})
    positions = torch.tensor(near, device="cpu")
    queries, keys = positions[:, None], positions[None, :]
    first = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
    try:
        with _OnHost():  # type: ignore[no-untyped-call]  # torch's has no annotations
            seen = mask_function(first, first, queries[None, None], keys[None, None]).reshape(queries.shape[0], -1)
    except IndexError:  # the function reads tokens of a batch
        return None
    causal = keys <= queries
    candidates = {Reach(): causal}
    if local_size is not None:
        candidates[Reach(window=size)] = causal & (queries - keys < size)
        candidates[Reach(chunk=size)] = causal & (queries // size == keys // size)
    return next((reach for reach, mask in candidates.items() if torch.equal(mask, seen)), None)
