"""Packed copies of layers' weights, kept up to date with the plain weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_slospec.cpu.kernels import DTYPES, PACKING, PLAIN, Matrix, choose, packed_by
from hf_slospec.model.checksum import weight_version
from hf_slospec.model.overrides import Prepacked, plain_class
from hf_slospec.model.whose_code import changing_hooks


class PackedWeight:
    """A packed copy of a layer's weight, and the version of the weight that it was made from.

    ``autocast``: dtype of the copy, for forwards that compute with autocast; None: the weight's
        own.
    """

    def __init__(self, layer: nn.Module, name: str, autocast: torch.dtype | None = None):
        self.layer = layer
        self.name = name
        self.autocast = autocast
        self.num_made = 0
        self.make()

    def make(self) -> None:
        """Make the copy anew from the layer's present weight."""
        weight: Any = self.layer._parameters.get(self.name)
        self.weight = weight
        self.choice = PLAIN
        self.num_made += 1
        self.matrices = list[
            Matrix
        ]()  # one, or one per expert; empty where torch's own kernels are used
        self.version: int | None = None
        if weight is None or not can_be_packed(weight):
            return
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # the copy may outlive the caller's inference mode
            self.version = weight_version(weight)
            plain = matrices_of(self.layer, weight, self.autocast)
            self.choice = choose(plain)
            if self.choice.kernel is not None:
                packed = [packed_by(PACKING[self.choice.kernel], each) for each in plain]
                self.matrices = [matrix for matrix in packed if matrix is not None]
                if len(self.matrices) != len(plain):  # some values are out of the kernel's range
                    self.matrices = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the copy."""
        return sum(matrix.num_bytes for matrix in self.matrices)

    @property
    def num_rounded(self) -> int:
        """Elements that the copy holds only approximately."""
        return sum(matrix.num_rounded for matrix in self.matrices)

    def renew(self) -> None:
        """Make the copy anew if the weight has changed."""
        weight: Any = self.layer._parameters.get(self.name)
        if weight is None or self.weight is not weight or self.version != weight_version(weight):
            self.make()

    def product(
        self, input: torch.Tensor, bias: torch.Tensor | None, index: int = 0
    ) -> torch.Tensor:
        """Return the product with the weight, or with one expert's.  [num_tokens, inputs] ->
        [num_tokens, outputs]
        """
        if self.autocast is not None:
            input = input.to(self.autocast)
            bias = None if bias is None else bias.to(self.autocast)
        if self.matrices and len(input) and self.choice.packs(len(input)):
            return self.matrices[index](input, bias)
        return F.linear(input, matrices_of(self.layer, self.weight)[index], bias)


def matrices_of(
    layer: nn.Module, weight: torch.Tensor, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return a layer's weight as matrices, one or one per expert, in a dtype.  -> [outputs, inputs]
    each
    """
    weight = weight.detach().to(dtype or weight.dtype)
    matrices = list(weight.unbind(0)) if weight.dim() == 3 else [weight]
    # Whether weights are stored as [inputs, outputs].
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


Copy = tuple[nn.Module, str]  # a layer and the name of its weight
# Attributes by which a module of fused experts is recognised.
EXPERTS = (
    "has_gate",
    "has_bias",
    "is_transposed",
    "has_post_expert_norm",
    "_is_expert_parallel",
    "_apply_gate",
)

active: ContextVar[Mapping[Copy, PackedWeight]] = ContextVar("hf_slospec_prepacked", default={})  # noqa: B039  read only


class _PrepackedLinear(Prepacked, nn.Linear):
    plain = nn.Linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output.  [..., inputs] -> [..., outputs]"""
        copy = _packed(self, "weight")
        if copy is None:  # not super(): another thread may have made the layer a plain one again
            return F.linear(input, self.weight, self.bias)
        return _along_last(copy, input, self.bias)


class _PrepackedConv1D(Prepacked, Conv1D):
    plain = Conv1D

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output.  [..., inputs] -> [..., outputs]"""
        copy = _packed(self, "weight")
        return Conv1D.forward(self, x) if copy is None else _along_last(copy, x, self.bias)


def _packed(layer: nn.Module, name: str) -> PackedWeight | None:
    """Return the packed weight to compute with; None in threads that run no packed
    forward.
    """
    copy = active.get().get((layer, name))
    if copy is None:
        return None
    is_autocast = torch.is_autocast_enabled("cpu")
    if copy.autocast != (torch.get_autocast_dtype("cpu") if is_autocast else None):
        return None  # a part of the forward switches autocast on or off
    return copy if copy.weight is not None else None


def _along_last(copy: PackedWeight, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the product along the last dimension.  [..., inputs] -> [..., outputs]"""
    if input.dim() == 2:
        return copy.product(input, bias)
    out = copy.product(input.reshape(-1, input.shape[-1]), bias)
    return out.view(*input.shape[:-1], out.shape[-1])


class _PrepackedExperts(Prepacked):
    """Base of the classes of fused experts; computes as transformers' grouped_mm does, one product
    per expert.
    """

    def forward(
        self: Any, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of experts' outputs.  -> [num_tokens, hidden]

        Args:
            hidden: [num_tokens, hidden].
            experts: [num_tokens, top_k] int64, each token's experts.
            weights: [num_tokens, top_k], the weights of their outputs.
        """
        up_name, down_name = weight_names(self)
        up = _packed(self, up_name)
        down = _packed(self, down_name)
        if not hidden.numel():
            return torch.empty_like(hidden)
        if up is None or down is None:
            plain: torch.Tensor = self.plain.forward(self, hidden, experts, weights)
            return plain
        up_bias, down_bias = (
            getattr(self, f"{name}_bias") if self.has_bias else None
            for name in (up_name, down_name)
        )
        expert_of, order = experts.flatten().sort(stable=True)
        outputs = []
        for index, tokens in enumerate(
            (order // experts.shape[1]).split(expert_of.bincount().tolist())
        ):
            if len(tokens):
                inner = up.product(
                    hidden[tokens], None if up_bias is None else up_bias[index], index
                )
                inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
                outputs.append(
                    down.product(inner, None if down_bias is None else down_bias[index], index)
                )
        out = torch.cat(outputs)  # [num_tokens * top_k, hidden], by expert
        out = self.post_expert_norm(out) if self.has_post_expert_norm else out
        weighted = out * weights.flatten()[order].unsqueeze(-1)
        by_token = torch.empty_like(weighted).index_copy_(0, order, weighted)
        return by_token.view(*experts.shape, -1).sum(1).to(hidden.dtype)


@functools.cache
def prepacked_class(plain: Any) -> Any:
    """Return the class that layers of class ``plain`` have during packed forwards."""
    known: dict[Any, Any] = {nn.Linear: _PrepackedLinear, Conv1D: _PrepackedConv1D}
    return known.get(plain) or type(
        f"Prepacked{plain.__name__}", (_PrepackedExperts, plain), {"plain": plain}
    )


def weight_names(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights that a linear layer or fused experts multiply by; none for
    other layers.
    """
    if plain_class(layer) in (nn.Linear, Conv1D):
        return ("weight",)
    if all(hasattr(layer, name) for name in EXPERTS) and not layer._is_expert_parallel:
        return ("gate_up_proj" if layer.has_gate else "up_proj", "down_proj")
    return ()


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer computes what its class says: no hooks, no replaced forward, dense
    weights.
    """
    is_replaced = "forward" in layer.__dict__ or hasattr(layer, "_hf_hook")
    weights = [layer._parameters.get(name) for name in weight_names(layer)]
    if not weights or is_replaced or changing_hooks(layer):
        return False
    return all(weight is not None and can_be_packed(weight) for weight in weights)
