"""Packed weights of the linear layers in a compiled graph.

Layers that read the same input are joined into one matrix. Weights that eager forwards read are
packed in ``packed_weights.py``."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from hf_slospec.cpu.operators import Context
from hf_slospec.cpu.packed_weights import FREE_SHARE, can_be_packed, matrices_of
from hf_slospec.cpu.quantised import PackedMatrix, dense
from hf_slospec.cpu.quantised_weight import QuantisedWeight
from hf_slospec.model.checksum import weight_version
from hf_slospec.model.memory import free_memory


class JoinedLinears:
    """Packed copies of the weights of all linear layers in a graph."""

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
            names: for each ``context_linear`` operator of the graph, by its index, the names of the
                layers that it computes.
            prepack: see SLOSpecConfig.
            is_invariant: the bits of a token's products must not depend on the number of tokens.

        Raises:
            RuntimeError: ``is_invariant`` is set, and a weight cannot be packed.
        """
        self._is_invariant = is_invariant
        self.context = Context(is_invariant)
        self._model = model
        self.names = names
        # Operator's index -> versions of its weights when they were packed, and the copy's bytes.
        self._made: dict[int, tuple[list[int], int]] = {}
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
        return sum(num_bytes for _, num_bytes in self._made.values())

    def renew(self) -> None:
        """Replace the packed copies of weights that have changed."""
        self._find_layers()
        for index, layers in enumerate(self._layers):
            versions, _ = self._made[index]
            if versions != _versions_of(layers):
                self._make(index)

    def _find_layers(self) -> None:
        self._layers: list[list[Any]] = [
            [self._model.get_submodule(name) for name in names] for names in self.names
        ]

    @torch.no_grad()
    def _make(self, index: int) -> None:
        layers = self._layers[index]
        versions = _versions_of(layers)
        with torch.inference_mode(False):  # the copies may outlive the caller's inference mode
            weights = [self._packed(layer) for layer in layers]
        if self._is_invariant and any(isinstance(weight, torch.Tensor) for weight in weights):
            raise RuntimeError(
                f"no products of {self.names[index][0]} are the same for any number of tokens"
            )
        self.context.set_linear(index, weights)
        copies = [
            weight.num_bytes
            for weight, layer in zip(weights, layers, strict=True)
            if isinstance(weight, PackedMatrix) and not isinstance(layer.weight, QuantisedWeight)
        ]
        self._made[index] = versions, sum(copies)

    def _packed(self, layer: Any) -> PackedMatrix | torch.Tensor:
        """Return a layer's weight, packed if that is wanted and possible."""
        if isinstance(layer.weight, QuantisedWeight):
            return layer.weight.matrix
        weight = matrices_of(layer, layer.weight)[0]
        if self._is_invariant or (self._packs and can_be_packed(layer.weight)):
            with contextlib.suppress(OverflowError):
                return PackedMatrix(dense(weight), self._is_invariant)
        return weight


def _versions_of(layers: Sequence[Any]) -> list[int]:
    return [weight_version(layer.weight) for layer in layers]


def join_linears(program: ExportedProgram, names: Sequence[str]) -> list[list[str]]:
    """Replace all ``context_linear`` operators that read the same input by one, in place.

    Args:
        program: graph with one operator for each layer.
        names: names of the layers by the index of their operator.

    Returns:
        The names of the layers that each remaining operator computes, by its new index.
    """
    graph = program.graph_module.graph
    by_input = defaultdict[Any, list[Any]](list)
    for node in graph.nodes:
        if (
            node.op == "call_function"
            and node.target is torch.ops.hf_slospec.context_linear.default
        ):
            by_input[node.args[0]].append(node)
    linears = list[list[str]]()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.hf_slospec.embedding.default:
            indices, context, index, *form = node.args
            node.args = indices, context, len(linears), *form
            linears.append([names[index]])
    for nodes in by_input.values():
        x, context = nodes[0].args[:2]  # read late: it may have been replaced below
        outputs = [node.args[3] for node in nodes]
        index = len(linears)
        linears.append([names[node.args[2]] for node in nodes])
        if len(nodes) == 1:
            nodes[0].args = x, context, index, outputs[0]
            continue
        with graph.inserting_before(nodes[0]):
            joined = graph.call_function(
                torch.ops.hf_slospec.context_linear.default, (x, context, index, sum(outputs))
            )
            first = nodes[0].meta["val"]
            joined.meta["val"] = first.new_empty(*first.shape[:-1], sum(outputs))
            begin = 0
            for node, length in zip(nodes, outputs, strict=True):
                part = graph.call_function(
                    torch.ops.aten.slice.Tensor, (joined, -1, begin, begin + length)
                )
                part.meta["val"] = joined.meta["val"][..., begin : begin + length]
                begin += length
                node.replace_all_uses_with(part)
        for node in nodes:
            graph.erase_node(node)
    graph.lint()
    program.graph_module.recompile()
    return linears
