"""Read from a mask function of transformers which keys a token sees: all before it, a window or its chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

FAR = 1 << 20  # a position beyond what a mask function may treat as near


class Reach(NamedTuple):
    """Limits of the keys that a layer's tokens see among themselves and those before them."""

    window: int | None = None
    chunk: int | None = None


class _OnHost(TorchDispatchMode):
    """Context in which operators compute on the host: on a GPU, an index beyond a tensor ends the process's context."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_host = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), (args, kwargs or {}))
        own_args, own_kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), on_host)
        return func(*own_args, **own_kwargs)


def reach_of(mask_function: Callable[..., torch.Tensor], local_size: int | None) -> Reach | None:
    """Return the reach of a mask by its values at the positions where windows and chunks of this size differ.

    Args:
        mask_function: of transformers.masking_utils; takes indices of rows, heads, queries and keys that broadcast.
        local_size: window or chunk in positions, None if the mask has none.

    Returns:
        None if the mask is neither causal, nor a sliding window, nor chunked.
    """
    size = local_size or FAR
    near = sorted({0, 1, 2, *(n * size + step for n in (1, 2, 3) for step in (-1, 0, 1))})
    positions = torch.tensor(near)
    queries, keys = positions[:, None], positions[None, :]
    first = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    try:
        with _OnHost():  # type: ignore[no-untyped-call]  # torch's has no annotations
            seen = mask_function(first, first, queries[None, None], keys[None, None]).reshape(queries.shape[0], -1)
    except IndexError:  # it looks up tokens of the batch
        return None
    causal = keys <= queries
    candidates = {Reach(): causal}
    if local_size is not None:
        candidates[Reach(window=size)] = causal & (queries - keys < size)
        candidates[Reach(chunk=size)] = causal & (queries // size == keys // size)
    return next((reach for reach, mask in candidates.items() if torch.equal(mask, seen)), None)
