"""The ``triton`` backend: one kernel for committed keys and trees."""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch

from hf_slospec.errors import UnsupportedOptionError
from hf_slospec.models.attention.dense import masked_attention
from hf_slospec.models.attention.flash_kernels import HALF
from hf_slospec.models.attention.sdpa import sdpa_attention
from hf_slospec.models.attention.tree_plan import MAX_ROWS, TreePlan, plan_tree
from hf_slospec.models.batch.attention_rules import AttentionRules
from hf_slospec.models.batch.cached_sequence import CachedSequence
from hf_slospec.models.batch.packed_batch import AttentionLayer, PackedBatch, Plans, Span

logger = logging.getLogger(__name__)

MAX_DIM = 256  # head size: larger ones do not fit into a multiprocessor's shared memory
VOLTA = (7, 0)  # compute capability; Triton compiles for none below
TRIAL_TOLERANCE = 0.05  # absolute: values are of order one, and bf16 rounds to 8 bits


def why_no_kernel(layer: AttentionLayer) -> str | None:
    """Return why the kernel cannot be used for a layer; None if it can."""
    if layer.is_own:
        return "the model's layers attend by themselves"
    key, value = layer.shape.key, layer.shape.value
    if key.dtype != value.dtype:
        return f"keys are {key.dtype} and values {value.dtype}"
    # A latent layer attends with K and V of other sizes than it caches.
    return _why_no_kernel(key.device, key.dtype, *((16, 16) if layer.is_latent else (key.dim, value.dim)))


@functools.cache
def _why_no_kernel(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> str | None:
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
    try:
        worst = trial_error(device, dtype, key_dim, value_dim)
    except Exception as error:  # noqa: BLE001  Triton fails in many ways, such as without a C compiler
        return f"the kernel failed in a trial with {error!r}"
    return None if worst <= TRIAL_TOLERANCE else f"the kernel was off by {worst:.2g} in a trial"  # also NaN


def trial_error(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> float:
    """Return the largest difference between the kernel and the reference in fp32 on a small batch."""
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device="cpu")
    spans = [
        Span(CachedSequence(1, 20, length=9), 0, 3, tree, torch.tensor([9, 10, 10], device="cpu")),
        Span(
            CachedSequence(22, 70),
            3,
            68,
            torch.ones(65, 65, device="cpu").tril().bool(),
            torch.arange(65, device="cpu"),
            is_chain=True,
        ),
    ]
    batch = PackedBatch(spans, [span.visible for span in spans])
    draw = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(shape, generator=draw, device="cpu").to(device, dtype)
        for shape in ((4, 68, key_dim), (96, 2, key_dim), (96, 2, value_dim))
    )
    sinks = torch.randn(4, generator=draw, device="cpu").to(device)
    worst = 0.0
    for rules in (AttentionRules(key_dim**-0.5), AttentionRules(key_dim**-0.5, 5, 3.0, sinks)):
        out = TreeAttention()(query, keys, values, batch, rules)
        expected = masked_attention(query.float(), keys.float(), values.float(), batch, rules)
        worst = max(worst, float((out.float() - expected).abs().max().nan_to_num(nan=torch.inf)))
    return worst


class TreeAttention:
    """The ``triton`` backend; layers with too many query heads per KV head, or too large heads, use ``sdpa``.

    With ``by_path``, the bits of a token's result depend on its path only, and such layers are refused.
    """

    __name__ = "tree_attention[triton]"  # step-time profiles are stored under this name

    def __init__(self, by_path: bool = False):
        self.by_path = by_path

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Plans,
        rules: AttentionRules,
    ) -> torch.Tensor:
        groups = query.shape[0] // keys.shape[1]
        is_same = query.dtype == keys.dtype == values.dtype
        if groups > MAX_ROWS or max(query.shape[-1], values.shape[-1]) > MAX_DIM or not is_same:
            why = f"{groups} query heads per KV head, {query.dtype}, {values.shape}"
            if self.by_path:
                raise UnsupportedOptionError(f'exact="self" is not available for a layer with {why}; leave exact out')
            logger.debug("sdpa instead of the kernel: %s", why)
            return sdpa_attention(query, keys, values, batch, rules)
        # Imported here: Triton comes with torch for CUDA only.
        from hf_slospec.models.attention.tree_kernels import tree_attention

        has_window = rules.window is not None
        kind = has_window, has_window or rules.chunk is not None, groups, self.by_path
        plan: TreePlan = batch.plan(plan_tree, query.device, *kind)
        return tree_attention(query, keys, values, plan, rules)
