"""Weights of a compiled graph's linear layers: layers of one input are joined, and packed for the
fastest kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hf_slospec.cpu.kernels import (
    BLOCKS,
    MEASURED_BYTES,
    PACKING,
    PLAIN,
    SIZES,
    Choice,
    Kernel,
    choose,
    packed_by,
)
from hf_slospec.cpu.operators import Blocks, Context
from hf_slospec.cpu.packed_weights import can_be_packed, matrices_of
from hf_slospec.cpu.prepacked import FREE_SHARE
from hf_slospec.model.checksum import weight_version
from hf_slospec.model.memory import free_memory

KERNELS: dict[str, Kernel] = {**PACKING, BLOCKS: Blocks}
BLOCKS_ONLY = Choice(kernel=BLOCKS, is_faster=(True,) * len(SIZES))


class _Made(NamedTuple):
    versions: list[int]  # those of the weights that the copy was made from
    num_bytes: int  # bytes of the packed copy


class JoinedLinears:
    """A context with weights of linear layers, and the state of the model's weights that they were
    made from.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        names: Sequence[Sequence[str]],
        prepack: bool | None,
        is_invariant: bool = False,
    ):
        """Pack the weights.

        Args:
            model: the model.
            names: those of the layers by index, of which those of one index have one input.
            prepack: see SLOSpecConfig.
            is_invariant: a token's products must not depend on the number of tokens.

        Raises:
            RuntimeError: they are to be invariant, and a weight cannot be packed in blocks.
        """
        self._is_invariant = is_invariant
        self.context = Context(is_invariant)
        self._model = model
        self.names = names
        self._choices: dict[Any, Choice] = {}
        self._made: dict[int, _Made] = {}
        self._find_layers()
        num_bytes = sum(layer.weight.nbytes for layers in self._layers for layer in layers)
        self._packs = prepack is not False and (
            prepack is not None or num_bytes <= FREE_SHARE * free_memory()
        )
        for index in range(len(names)):
            self._make(index)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(made.num_bytes for made in self._made.values())

    def renew(self) -> None:
        """Make copies anew of changed weights."""
        self._find_layers()
        for index, layers in enumerate(self._layers):
            if self._made[index].versions != _versions_of(layers):
                self._make(index)

    def _find_layers(self) -> None:
        self._layers: list[list[Any]] = [
            [self._model.get_submodule(name) for name in names] for names in self.names
        ]

    @torch.no_grad()
    def _make(self, index: int) -> None:
        layers = self._layers[index]
        versions = _versions_of(layers)
        choice = PLAIN
        with torch.inference_mode(False):  # the copies may outlive the caller's inference mode
            plain = [matrices_of(layer, layer.weight)[0] for layer in layers]
            if self._is_invariant:
                choice = BLOCKS_ONLY
            elif self._packs and all(can_be_packed(layer.weight) for layer in layers):
                choice = self._choice(index)
            packed = (
                None
                if choice.kernel is None
                else packed_by(KERNELS[choice.kernel], torch.cat(plain))
            )
            if self._is_invariant and packed is None:
                raise RuntimeError(
                    f"no products of {self.names[index][0]} are the same for any number of tokens"
                )
            matrices = [] if packed is None else [packed]
            self.context.set_linear(index, plain, matrices, choice)
        self._made[index] = _Made(versions, sum(matrix.num_bytes for matrix in matrices))

    def _choice(self, index: int) -> Choice:
        """Return the kernel for this layer, measured on joined weights of its shape if this machine
        has not yet.
        """
        shapes = [_shape_of(layers) for layers in self._layers]
        shape = shapes[index]
        if shape not in self._choices:
            same = [
                layers for layers, other in zip(self._layers, shapes, strict=True) if other == shape
            ]
            num_bytes = sum(layer.weight.nbytes for layer in same[0])
            measured = same[: math.ceil(MEASURED_BYTES / num_bytes)]
            joined = [
                torch.cat([matrices_of(layer, layer.weight)[0] for layer in layers])
                for layers in measured
            ]
            self._choices[shape] = choose(joined, {BLOCKS: Blocks})
        return self._choices[shape]


def _shape_of(layers: Sequence[Any]) -> Any:
    return tuple((layer.weight.dtype, layer.weight.shape) for layer in layers)


def _versions_of(layers: Sequence[Any]) -> list[int]:
    return [weight_version(layer.weight) for layer in layers]
