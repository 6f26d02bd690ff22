"""The ``triton`` attention backend: plans of packed batches, and trials of the kernel.

The kernel, which computes attention over committed and staged keys, is in ``tree_kernels.py``.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from hf_slospec.cuda.flash_kernels import HALF
from hf_slospec.errors import UnsupportedOptionError
from hf_slospec.model.attention.backends import KernelAttention
from hf_slospec.model.attention.sdpa import masked_attention
from hf_slospec.model.batch import (
    AttentionLayer,
    AttentionPlan,
    AttentionRules,
    CachedSequence,
    PackedBatch,
    Plans,
    Span,
)

# Rows per tile: the fewest that tensor cores multiply, and the most that fit into registers.
MIN_ROWS = 16
MAX_ROWS = 64
MIN_WIDTH = 16  # fewest columns of the mask of a padded batch


@dataclass(frozen=True, eq=False)
class TreePlan(AttentionPlan):
    """Tokens of a packed batch, divided into tiles that each hold tokens of one sequence and are
    computed by one program of the kernel.

    From the slot ``start`` on, the layer's K and V have ``prefix_len`` committed and ``num_staged``
    staged tokens of the sequence. A tile's first token has the index ``first_token`` in the batch,
    and the index ``offset`` among the tokens of its sequence in the batch. Tiles of 0 tokens are
    padding.

    With ``paths``, ``num_staged`` of a tile in a tree is the length of its tokens' longest path.
    """

    # [num_tiles, 8] int32: start, prefix_len, num_staged, first_token, number of tokens, offset,
    # index of the sequence, is_chain
    tiles: torch.Tensor
    # [num_tokens, width] bool, True = may attend to this staged token of the sequence; or int64,
    # see NewTokens.mask. Not read for chains.
    mask: torch.Tensor
    # [num_tokens] int32; None: the layer's attention does not depend on positions
    positions: torch.Tensor | None
    staged_positions: torch.Tensor | None  # [num_sequences, width] int32
    # [num_tokens, 1 + longest] int32: number of staged tokens that the token attends to (those on
    # its path), then their indices among the sequence's staged tokens. The kernel reads this in
    # place of the mask; None: it reads the mask.
    paths: torch.Tensor | None
    num_rows: int  # rows per tile, at least its tokens times the query heads that share a KV head

    def completed(self, seen: torch.Tensor | None = None) -> TreePlan:
        """Return the plan with a boolean mask, looked up in the table ``seen`` if there is one."""
        return self if seen is None else replace(self, mask=seen[self.mask])


def plan_tree(
    batch: PackedBatch, has_window: bool, by_position: bool, groups: int, by_path: bool = False
) -> TreePlan:
    """Return the plan of a batch, made on the host.

    If the batch is padded, the plan's sizes depend only on its numbers of tokens and sequences and,
    rounded up, on its largest tree.

    Args:
        batch: the batch; not padded if ``by_path``.
        has_window: the layers have a sliding window.
        by_position: the layers have a sliding window or chunks, so that positions are read.
        groups: query heads per KV head.
        by_path: make ``paths``, and choose ``num_rows`` independently of the batch.
    """
    spans = batch.spans
    num_tokens = spans[-1].end
    width = max((span.num_staged for span in spans if not span.is_chain or by_position), default=1)
    if batch.is_padded:
        width = max(MIN_WIDTH, 1 << (width - 1).bit_length())
    is_small = groups <= MIN_ROWS if by_path else groups * num_tokens <= MIN_ROWS * len(spans)
    num_rows = MIN_ROWS if is_small else MAX_ROWS  # a kernel is compiled for each
    tokens_per_tile = num_rows // groups
    tiles = [
        (slots.start, span.num_visible - span.num_staged, span.num_staged, span.begin + offset,
         min(tokens_per_tile, span.num_tokens - offset), offset, sequence, span.is_chain)
        for sequence, (span, slots) in enumerate(zip(spans, batch.visible, strict=True))
        for offset in range(0, span.num_tokens, tokens_per_tile)
    ]  # fmt: skip
    num_tiles = num_tokens // tokens_per_tile + len(spans) if batch.is_padded else len(tiles)
    array = np.zeros((num_tiles, 8), dtype=np.int32)
    array[: len(tiles)] = tiles
    window = 0 if has_window else None
    mask = _mask(
        spans, [None if span.is_chain else span.staged_mask_for(window) for span in spans], width
    )
    positions = staged_positions = paths = None
    if by_position:
        positions = torch.cat([span.staged_positions[-span.num_tokens :] for span in spans]).int()
        staged_positions = _joined(
            torch.stack, [span.staged_positions for span in spans], width
        ).int()
    if by_path:
        paths = _paths(mask.cpu())
        lengths = np.maximum.reduceat(paths[:, 0].numpy(), array[:, 3])  # each tile's longest path
        array[:, 2] = np.where(array[:, 7], array[:, 2], lengths)
    return TreePlan(torch.from_numpy(array), mask, positions, staged_positions, paths, num_rows)


def _paths(mask: torch.Tensor) -> torch.Tensor:
    """Return for each row of a mask the number of its true columns, then their indices.  ->
    [num_tokens, *] int32
    """
    lengths = mask.sum(1)
    rows, columns = mask.nonzero(as_tuple=True)
    paths = torch.zeros(len(mask), 1 + int(lengths.max()), dtype=torch.int32, device="cpu")
    paths[:, 0] = lengths
    firsts = (lengths.cumsum(0) - lengths)[rows]  # among all true columns, each row's first
    paths[rows, 1 + torch.arange(len(rows), device="cpu") - firsts] = columns.int()
    return paths


def _mask(spans: list[Span], masks: list[torch.Tensor | None], width: int) -> torch.Tensor:
    """Return one mask with the rows of all spans, padded with 0; where a mask is None, the rows are
    not read.  -> [num_tokens, width], of the masks' dtype
    """
    given = [mask for mask in masks if mask is not None]
    # Only draft levels that run eagerly have masks on the device: as few operations as possible.
    if given and not given[0].is_cpu:
        pairs = zip(spans, masks, strict=True)
        rows = [span.staged_mask[:, :width] if mask is None else mask for span, mask in pairs]
        return _joined(torch.cat, rows, width)
    whole = torch.zeros(
        spans[-1].end, width, dtype=given[0].dtype if given else torch.bool, device="cpu"
    )
    for span, mask in zip(spans, masks, strict=True):
        if mask is not None:
            whole[span.begin : span.end, : mask.shape[1]] = mask
    return whole


def _joined(
    join: Callable[[list[torch.Tensor]], torch.Tensor], rows: list[torch.Tensor], width: int
) -> torch.Tensor:
    """Return tensors [*, any width], padded with 0 and joined by ``join``.  -> [num_rows, width]"""
    if len({row.shape[-1] for row in rows}) > 1:
        return join([F.pad(row, (0, width - row.shape[-1])) for row in rows])
    whole = join(rows)
    return F.pad(whole, (0, width - whole.shape[1])) if whole.shape[1] < width else whole


MAX_DIM = 256  # head size: larger ones do not fit into a multiprocessor's shared memory
VOLTA = (7, 0)  # lowest compute capability for which Triton compiles
TRIAL_TOLERANCE = 0.05  # absolute: values are of order one, and bf16 rounds to 8 bits


def why_no_kernel(layer: AttentionLayer) -> str | None:
    """Return why the kernel cannot be used for a layer; None if it can."""
    key = layer.shape.key
    value = layer.shape.value
    if key.dtype != value.dtype:
        return f"keys are {key.dtype} and values {value.dtype}"
    # A latent layer attends with K and V of other sizes than it caches.
    dims = (16, 16) if layer.is_latent else (key.dim, value.dim)
    return _why_no_kernel(key.device, key.dtype, *dims)


@functools.cache
def _why_no_kernel(
    device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int
) -> str | None:
    if device.type != "cuda":
        return f"the kernel needs a CUDA device, and this is {device.type}"
    if dtype not in HALF:
        return f"the kernel does not compute in {dtype}"
    if torch.cuda.get_device_capability(device) < VOLTA:
        return f"{torch.cuda.get_device_name(device)} is older than Volta (compute capability 7.0)"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if max(key_dim, value_dim) > MAX_DIM:
        return f"heads of size {key_dim} with values of size {value_dim} are larger than {MAX_DIM}"
    wrong = why_wrong(TreeAttention(), device, dtype, key_dim, value_dim)
    return None if wrong is None else f"the kernel {wrong}"


def why_wrong(
    attend: Callable[..., torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    has_softcap: bool = True,
) -> str | None:
    """Return how a backend fails on a small batch, or differs from the reference in fp32; None if
    it does neither.
    """
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device="cpu")
    offsets = torch.tensor([0, 1, 1], device="cpu")
    causal = torch.ones(65, 65, device="cpu").tril().bool()  # more than MAX_DENSE tokens
    spans = [
        Span(CachedSequence(1, 20, length=9), 0, 3, tree, 9 + offsets),
        Span(
            CachedSequence(22, 70, length=5),
            3,
            68,
            causal,
            torch.arange(5, 70, device="cpu"),
            is_chain=True,
        ),
        Span(CachedSequence(93, 3), 68, 71, tree, offsets),
    ]
    batch = PackedBatch(spans, [span.visible for span in spans])
    draw = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(shape, generator=draw, device="cpu").to(device, dtype)
        for shape in ((4, 71, key_dim), (100, 2, key_dim), (100, 2, value_dim))
    )
    sinks = torch.randn(4, generator=draw, device="cpu").to(device)
    softcap = 3.0 if has_softcap else None
    worst = 0.0
    try:
        for window, cap, sink in ((None, None, None), (5, softcap, sinks)):
            rules = AttentionRules(key_dim**-0.5, window, cap, sink)
            out = attend(query, keys, values, batch, rules)
            expected = masked_attention(query.float(), keys.float(), values.float(), batch, rules)
            off = (out.float() - expected).abs().max().nan_to_num(nan=torch.inf)
            worst = max(worst, float(off))
    except Exception as error:  # noqa: BLE001  compilers of kernels raise classes of their own
        return f"failed in a trial with {error!r}"
    return None if worst <= TRIAL_TOLERANCE else f"was off by {worst:.2g} in a trial"


class TreeAttention(KernelAttention):
    """The ``triton`` attention backend.

    With ``by_path``, the bits of a token's result depend only on the tokens that it attends to, and
    for a layer that the kernel cannot compute, an error is raised instead of using a fallback."""

    __name__ = "tree_attention[triton]"  # step-time profiles are stored under this name

    def __init__(self, by_path: bool = False):
        super().__init__()
        self.by_path = by_path

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Plans,
        rules: AttentionRules,
    ) -> torch.Tensor | str:
        groups = query.shape[0] // keys.shape[1]
        is_same = query.dtype == keys.dtype == values.dtype
        fits = groups <= MAX_ROWS and max(query.shape[-1], values.shape[-1]) <= MAX_DIM
        if not (fits and is_same):
            why = f"{groups} query heads per KV head, {query.dtype}, {values.shape}"
            if self.by_path:
                raise UnsupportedOptionError(
                    f'exact="self" is not available for a layer with {why}; leave exact out'
                )
            return why
        # Imported here, as Triton comes with torch for CUDA only.
        from hf_slospec.cuda.tree_kernels import tree_attention

        has_window = rules.window is not None
        kind = has_window, has_window or rules.chunk is not None, groups, self.by_path
        plan: TreePlan = batch.plan(plan_tree, query.device, *kind)
        return tree_attention(query, keys, values, plan, rules)
