"""Attention backends for packed batches: their signature, the registry that plugins add to, and the
choice of a backend for a model.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from hf_slospec.assembly import load_plugins
from hf_slospec.errors import UnsupportedOptionError
from hf_slospec.model.attention.sdpa import masked_attention, sdpa_attention
from hf_slospec.model.batch import AttentionLayer, AttentionRules, Plans

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """A function that computes attention of a packed batch's tokens over the keys that each may
    see.
    """

    __name__: str  # name of the backend; saved cost profiles are only used with the same backend

    def __call__(
        self,
        query: torch.Tensor,  # [num_heads, num_tokens, head_dim]
        keys: torch.Tensor,  # [num_slots, num_kv_heads, head_dim]
        values: torch.Tensor,  # [num_slots, num_kv_heads, value_dim]
        batch: Plans,
        rules: AttentionRules,
    ) -> torch.Tensor:
        """Return the output, [num_tokens, num_heads, value_dim]."""


class KernelAttention(ABC):
    """Base of backends that call kernels for the whole packed batch; ``sdpa`` computes layers that
    no kernel supports.

    The kernels read only tensors whose sizes do not depend on sequence lengths, so CUDA graphs can
    contain them.
    """

    __name__: str

    def __init__(self) -> None:
        self._logged = set[str]()  # reasons for using sdpa that were logged, each once

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Plans,
        rules: AttentionRules,
    ) -> torch.Tensor:
        attended = self.attend(query, keys, values, batch, rules)
        if not isinstance(attended, str):
            return attended
        if attended not in self._logged:
            self._logged.add(attended)
            log = logging.getLogger(type(self).__module__)
            log.debug("sdpa instead of %s: %s", self.__name__, attended)
        return sdpa_attention(query, keys, values, batch, rules)

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Plans,
        rules: AttentionRules,
    ) -> torch.Tensor | str:
        """Compute attention by a kernel, or return the reason why no kernel supports these tensors.

        Arguments and output are those of :class:`Backend`.
        """


class Kernels(NamedTuple):
    """Constructor and availability check of a kernel backend, which a plugin adds to
    :data:`KERNELS`.
    """

    # Returns why no kernel supports a layer; None if one does.
    why_not: Callable[[AttentionLayer], str | None]
    # (layers, by_path) -> the backend, see backend_for
    new: Callable[[Sequence[AttentionLayer], bool], KernelAttention]


# Name of the option ``attention`` -> its kernels, in the order in which "auto" tries them.
KERNELS: dict[str, Kernels] = {}
# Makes, of backends that "auto" may use, one that uses the fastest; a plugin adds it.
FASTEST: list[Callable[[Sequence[KernelAttention]], KernelAttention]] = []


def backend_for(attention: str, layers: Sequence[AttentionLayer], by_path: bool = False) -> Backend:
    """Return the attention backend of a model.

    Args:
        attention: name of the backend; "auto": the faster of triton and flash by a trial for each
            shape of layers, if some layer can use them, else sdpa.
        layers: attention layers of the model.
        by_path: on CUDA, the bits of a token's result must depend only on the tokens that it
            attends to. The caller has checked :func:`why_no_triton`.

    Raises:
        UnsupportedOptionError: ``attention`` is "triton" or "flash", and no layer can use it.
    """
    if attention == "4d_mask":
        return masked_attention
    on_cuda = any(layer.shape.key.device.type == "cuda" for layer in layers)
    if attention == "sdpa" or (attention == "auto" and not on_cuda):
        return sdpa_attention
    load_plugins()
    usable: list[KernelAttention] = []
    for name in KERNELS if attention == "auto" else (attention,):
        reasons = [why_no_kernel(name, layer) for layer in layers]
        if None in reasons:
            usable.append(KERNELS[name].new(layers, by_path))
            if by_path:
                break
            continue
        why = "; ".join(dict.fromkeys(map(str, reasons)))
        if name == attention:
            raise UnsupportedOptionError(
                f'attention="{attention}" is not available: {why}; use attention="auto"'
            )
        logger.debug("no %s attention: %s", name, why)
    if len(usable) > 1:
        return FASTEST[0](usable)
    return usable[0] if usable else sdpa_attention


def why_no_triton(layers: Sequence[AttentionLayer]) -> str | None:
    """Return why some layer cannot use the Triton backend; None if all layers can."""
    reasons = (why_no_kernel("triton", layer) for layer in layers)
    return next(filter(None, reasons), None)


def why_no_kernel(name: str, layer: AttentionLayer) -> str | None:
    """Return why no kernel of the backend ``name`` supports a layer; None if one does."""
    load_plugins()
    if (kernels := KERNELS.get(name)) is None:
        return "hf_slospec.cuda is not there"
    return "the model's layers attend by themselves" if layer.is_own else kernels.why_not(layer)
