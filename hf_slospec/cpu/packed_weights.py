"""Packed copies of a model's weights on a CPU, for faster kernels in eager forwards.

``torch.nn.functional.linear`` reads weights in their plain layout, which for the few tokens of a
decode step takes up to six times as long (docs/cpus.md). Only packed forwards use the copies; other
forwards of the model are unchanged. ``joined_linears.py`` packs weights for compiled forwards, and
``kernels.py`` chooses the kernels.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_slospec.cpu.kernels import DTYPES, PACKING, Matrix, kernel_for, packed_by
from hf_slospec.model.checksum import weight_version
from hf_slospec.model.linear_overrides import (
    LinearOverride,
    Override,
    OverrideOptions,
    weight_names,
)
from hf_slospec.model.memory import free_memory
from hf_slospec.model.version import ModelVersion
from hf_slospec.model.whose_code import changing_hooks, is_compiled

logger = logging.getLogger(__name__)

FREE_SHARE = 0.25  # share of the free memory that copies may take with prepack=None


class PackedWeight:
    """A packed copy of one weight of a layer, and the version of the weight that was packed.

    ``autocast``: dtype of the copy, for forwards under autocast; None: the dtype of the weight.
    """

    def __init__(self, layer: nn.Module, name: str, autocast: torch.dtype | None = None):
        self.layer = layer
        self.name = name
        self.autocast = autocast
        self.num_made = 0
        self.make()

    def make(self) -> None:
        """Make the copy from the layer's present weight; none if no kernel is worth a copy."""
        weight: Any = self.layer._parameters.get(self.name)
        self.weight = weight
        self.kernel: str | None = None
        self.num_made += 1
        # One matrix, or one per expert; empty if torch's own kernels are used.
        self.matrices: list[Matrix] = []
        self.version: int | None = None
        if weight is None or not can_be_packed(weight):
            return
        # The copy may outlive the caller's inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self.version = weight_version(weight)
            plain = matrices_of(self.layer, weight, self.autocast)
            self.kernel = kernel_for(plain[0])
            if self.kernel is not None:
                packed = [packed_by(PACKING[self.kernel], each) for each in plain]
                if None not in packed:  # all values are in the kernel's range
                    self.matrices = [matrix for matrix in packed if matrix is not None]

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy."""
        return sum(matrix.num_bytes for matrix in self.matrices)

    @property
    def num_rounded(self) -> int:
        """Elements that the copy holds only approximately."""
        return sum(matrix.num_rounded for matrix in self.matrices)

    def renew(self) -> None:
        """Make the copy again if the weight has changed."""
        weight: Any = self.layer._parameters.get(self.name)
        if weight is None or self.weight is not weight or self.version != weight_version(weight):
            self.make()

    def product(
        self, input: torch.Tensor, bias: torch.Tensor | None, index: int = 0
    ) -> torch.Tensor:
        """Return ``input`` times the weight (of experts: of expert ``index``), plus the bias.

        [num_tokens, inputs] -> [num_tokens, outputs]
        """
        if self.autocast is not None:
            input = input.to(self.autocast)
            bias = None if bias is None else bias.to(self.autocast)
        if self.matrices and len(input):
            return self.matrices[index](input, bias)
        return F.linear(input, matrices_of(self.layer, self.weight)[index], bias)


def matrices_of(
    layer: nn.Module, weight: torch.Tensor, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return a layer's weight as one matrix, or one per expert, in ``dtype`` or else its dtype.  ->
    [outputs, inputs] each
    """
    weight = weight.detach().to(dtype or weight.dtype)
    matrices = list(weight.unbind(0)) if weight.dim() == 3 else [weight]
    # True: the layer stores its weights as [inputs, outputs].
    is_transposed = getattr(layer, "is_transposed", isinstance(layer, Conv1D))
    return [matrix.T for matrix in matrices] if is_transposed else matrices


def can_be_packed(weight: nn.Parameter) -> bool:
    """Return whether a weight is a dense parameter on the CPU that kernels can pack."""
    is_dense = (
        weight.device.type == "cpu" and weight.layout is torch.strided and weight.is_contiguous()
    )
    is_plain = type(weight) is nn.Parameter and not weight.is_inference()
    has_kernel = any(weight.dtype in dtypes for dtypes in DTYPES.values())
    return bool(is_plain and is_dense and weight.numel() > 0 and has_kernel)


class PackedLayer:
    """Override that computes a linear layer or fused experts with packed weights."""

    def __init__(self, copies: Sequence[PackedWeight]):
        self.copies = copies
        self._compute: Override = _linear if len(copies) == 1 else _experts

    def __call__(self, original: Override, layer: Any, *inputs: Any, **named: Any) -> Any:
        """Return the layer's output, from ``original`` if the copies do not fit this call."""
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        for copy in self.copies:
            # The model's forward may switch autocast on or off for some layers.
            if named or copy.autocast != dtype or layer._parameters.get(copy.name) is None:
                return original(layer, *inputs, **named)
        return self._compute(layer, *self.copies, *inputs)


def _linear(layer: Any, copy: PackedWeight, input: torch.Tensor) -> torch.Tensor:
    """Return a linear layer's output.  [..., inputs] -> [..., outputs]"""
    if input.dim() == 2:
        return copy.product(input, layer.bias)
    out = copy.product(input.reshape(-1, input.shape[-1]), layer.bias)
    return out.view(*input.shape[:-1], out.shape[-1])


def _experts(
    layer: Any,
    up: PackedWeight,
    down: PackedWeight,
    hidden: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return each token's weighted sum of its experts' outputs.  -> [num_tokens, hidden]

    As in transformers' grouped_mm, all tokens of an expert are multiplied at once.

    Args:
        layer: the module of the fused experts.
        up: packed weights of the projection before the activation.
        down: packed weights of the projection after the activation.
        hidden: [num_tokens, hidden].
        experts: [num_tokens, top_k] int64, indices of each token's experts.
        weights: [num_tokens, top_k], factors of these experts' outputs.
    """
    if not hidden.numel():
        return torch.empty_like(hidden)
    up_bias, down_bias = (
        getattr(layer, f"{copy.name}_bias") if layer.has_bias else None for copy in (up, down)
    )
    expert_of, order = experts.flatten().sort(stable=True)
    outputs = []
    for index, tokens in enumerate(
        (order // experts.shape[1]).split(expert_of.bincount().tolist())
    ):
        if len(tokens):
            inner = up.product(hidden[tokens], None if up_bias is None else up_bias[index], index)
            inner = layer._apply_gate(inner) if layer.has_gate else layer.act_fn(inner)
            outputs.append(
                down.product(inner, None if down_bias is None else down_bias[index], index)
            )
    out = torch.cat(outputs)  # [num_tokens * top_k, hidden], sorted by expert
    out = layer.post_expert_norm(out) if layer.has_post_expert_norm else out
    weighted = out * weights.flatten()[order].unsqueeze(-1)
    by_token = torch.empty_like(weighted).index_copy_(0, order, weighted)
    return by_token.view(*experts.shape, -1).sum(1).to(hidden.dtype)


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer computes what its class says: no hooks, no replaced forward, dense
    weights.
    """
    is_replaced = "forward" in layer.__dict__ or hasattr(layer, "_hf_hook")
    weights = [layer._parameters.get(name) for name in weight_names(layer)]
    if not weights or is_replaced or changing_hooks(layer):
        return False
    return all(weight is not None and can_be_packed(weight) for weight in weights)


_Key = tuple[int, str, torch.dtype | None]  # id of a layer, name of its weight, dtype of autocast
# Packed weights of all models, so that a layer has one copy for all its users. Each of them holds
# its layer, so that the layer's id is not reused for another object.
_shared: WeakValueDictionary[_Key, PackedWeight] = WeakValueDictionary()


class PackedWeights(LinearOverride):
    """Override that computes one model's linear layers with packed copies of their weights."""

    def __init__(
        self, model: nn.Module, wanted: bool | None, autocast: torch.dtype | None = None
    ) -> None:
        """Store the options; :meth:`renew` makes the copies.

        Args:
            model: the model.
            wanted: ``prepack`` of SLOSpecConfig; None: only if the copies take at most
                ``FREE_SHARE`` of the free memory.
            autocast: see :class:`PackedWeight`.
        """
        self._model = model
        self._wanted = wanted
        self._autocast = autocast
        self._copies: WeakSet[PackedWeight] = WeakSet()  # copies in use, held by overrides
        self._prepared: dict[nn.Module, list[PackedWeight]] = {}

    @classmethod
    def for_model(cls, model: nn.Module, options: OverrideOptions) -> PackedWeights | None:
        """Return the override for a model; None with ``prepack=False``."""
        return None if options.prepack is False else cls(model, options.prepack, options.autocast)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.num_bytes for copy in self._copies)

    @property
    def num_rounded(self) -> int:
        """Weights that the copies hold only approximately."""
        return sum(copy.num_rounded for copy in self._copies)

    @property
    def kernels(self) -> dict[str, int]:
        """Number of weights by the kernel that multiplies with them."""
        return dict(Counter(str(copy.kernel) for copy in self._copies if copy.matrices))

    def make(self, linear: nn.Module) -> Override | None:
        """Return an override that computes a layer with packed weights; None if it has none."""
        copies = self._prepared.pop(linear, [])
        if not copies or not all(copy.matrices for copy in copies):
            return None
        self._copies.update(copies)
        return PackedLayer(copies)

    def renew(self, version: ModelVersion) -> None:
        """Choose kernels, and make the copies that are missing or whose weights have changed."""
        self._copies.clear()
        kernels = self._kernels_by_layer()
        new = [
            (layer, name)
            for layer in kernels
            for name in weight_names(layer)
            if self._key(layer, name) not in _shared
        ]
        if self._wanted is None:
            weights = [getattr(layer, name) for layer, name in new]
            sizes = [each.numel() * (self._autocast or each.dtype).itemsize for each in weights]
            self._wanted = self._fits(sum(sizes))
        layers = list(kernels) if self._wanted else []
        if any("FBGEMM" in kernels[layer] for layer, _ in new):
            # FBGEMM packs in one thread, 50 million weights per second; so layers run in parallel.
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                made = list(pool.map(self._copies_of, layers))
        else:
            made = list(map(self._copies_of, layers))
        self._prepared = dict(zip(layers, made, strict=True))
        if num_rounded := sum(copy.num_rounded for copies in made for copy in copies):
            logger.info(
                "%d weights of %s are too small for fp16; their copies differ by less than 3e-8",
                num_rounded,
                type(self._model).__name__,
            )

    def _kernels_by_layer(self) -> dict[nn.Module, list[str]]:
        """Return the kernels of each layer's weights, for layers that are faster with all weights
        packed.
        """
        if self._wanted is False or is_compiled(self._model):
            return {}
        kernels = dict[nn.Module, list[str]]()
        for layer in filter(is_plain, self._model.modules()):
            weights = [
                matrices_of(layer, getattr(layer, name), self._autocast)[0]
                for name in weight_names(layer)
            ]
            chosen = list(map(kernel_for, weights))
            if None not in chosen:
                kernels[layer] = [str(kernel) for kernel in chosen]
        return kernels

    def _fits(self, num_bytes: int) -> bool:
        if num_bytes <= FREE_SHARE * free_memory():
            return True
        logger.info(
            "weights of %s are not prepacked: the copies would take %.1f GiB, more than a quarter of the free "
            "memory; SLOSpecConfig(prepack=True) makes them anyway",
            type(self._model).__name__,
            num_bytes / 2**30,
        )
        return False

    def _key(self, layer: nn.Module, name: str) -> _Key:
        return id(layer), name, self._autocast

    def _copies_of(self, layer: nn.Module) -> list[PackedWeight]:
        """Return the packed weights of a layer; make those that are missing or out of date."""
        copies = []
        for name in weight_names(layer):
            key = self._key(layer, name)
            if (copy := _shared.get(key)) is not None:
                copy.renew()
            copies.append(
                copy or _shared.setdefault(key, PackedWeight(layer, name, self._autocast))
            )
        return copies
