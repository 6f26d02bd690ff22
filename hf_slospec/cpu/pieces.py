"""A model's forward graph in pieces, cut at its attention operators. Layers that are alike give
pieces that are alike, of which the compiler gets one.

The graph becomes a TorchScript function, whose interpreter in C++ calls compiled pieces and the
operators between them. Rare pieces, such as the first and the last one of a deep model, are not
compiled: their operators are a part of the function.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._inductor
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export

from hf_slospec.cpu.operators import SHIMS
from hf_slospec.model.machine import digest

# Share of a graph's pieces that may be interpreted: one takes longer than it would take compiled,
# but little of a forward.
MAX_INTERPRETED = 0.125
# Numbers of tokens and of logits that a graph takes; for 1, the compiler would make another graph.
MIN_SIZE = 2
MAX_TOKENS = 2**20
SIZE = torch.ops.aten.sym_size.int
CHECK = torch.ops.aten._assert_tensor_metadata.default  # checks what the compiler knows
# Patterns in the Python text of a graph, and what TorchScript has in their place.
PYTHON = {
    r"forward\(self, ": "forward(",
    r";  .*": "",  # which deletes variables
    r"(torch\.ops\.\w+\.\w+)\.\w+": r"\1",  # overloads are found by the arguments
    r"device\(type=('\w+')\)": r"\1",
}
# Settings of torch's compiler. Its wrapper calls kernels and operators, and is quick enough without
# optimisation; a precompiled header takes longer than one package gains by it.
COMPILER: dict[str, Any] = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.custom_ops_to_c_shims": SHIMS,
}
# Seconds to compile a package, and a layer in it.
PACKAGE_S = 8.0
LAYER_S = 1.5
Cuts = list[list[fx.Node]]


class Piece:
    """Operators of a graph, without attention, as a graph of their own."""

    def __init__(self, nodes: list[fx.Node], graph: Graph):
        """Copy the nodes.

        Raises:
            ValueError: they read a size that no tensor has that they read, or a tensor with a
                computed size.
        """
        self.first = nodes[0]
        self.nodes = set(nodes)
        self.outputs = [node for node in nodes if not self.nodes.issuperset(node.users)]
        read = [each for node in nodes for each in node.all_input_nodes if each not in self.nodes]
        self.inputs = [node for node in dict.fromkeys(read) if not graph.is_copied(node)]
        if any(_is_computed(size) for node in self.inputs for size in node.meta["val"].shape):
            raise ValueError("a tensor between two pieces has a computed size")
        self.linears = list[int]()  # index of each `context_linear` operator in the model
        copy = _Copy(self.inputs, graph)
        table = copy.copies[graph.context] = copy.made.placeholder("table")
        for node in nodes:
            copied = copy(node)
            if table in copied.all_input_nodes and not is_attention(node):
                place = copied.args.index(table) + 1  # where the linear layer's index is
                index: Any = copied.args[place]
                copied.args = (*copied.args[:place], len(self.linears), *copied.args[place + 1 :])
                self.linears.append(index)
        copy.made.output(tuple(map(copy, self.outputs)))
        self.module = fx.GraphModule(copy.constants, copy.made)
        self.constants = [value.tolist() for value in copy.constants.buffers()]
        inner = [str(getattr(module, "code", module)) for module in copy.constants.children()]
        self.key = digest([self.module.code, self.constants, inner, _described(self.inputs)])

    @property
    def is_simple(self) -> bool:
        """Return whether the interpreter has all its operators."""
        return not self.constants and all(
            isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
            for node in self.nodes
        )

    def program(self) -> ExportedProgram:
        """Return the graph to compile, which takes the inputs and a table, [1 + number of linears]
        int64, of the context's id and the linear layers' indices in the model.
        """
        dims = dict[str, Any]()
        values = [node.meta["val"] for node in self.inputs]
        table = torch.zeros(1 + len(self.linears), dtype=torch.int64, device="cpu")
        shapes = [
            {
                i: dims.setdefault(str(size), Dim(f"d{len(dims)}", min=MIN_SIZE, max=MAX_TOKENS))
                for i, size in enumerate(value.shape)
                if isinstance(size, torch.SymInt)
            }
            for value in values
        ]
        return export(
            self.module,
            (*map(_example, values), table),
            dynamic_shapes=(*shapes, None),
            strict=False,
        )

    def compile(self, path: Path) -> None:
        """Write the package of the piece."""
        from torch._inductor import config  # imported here: it takes a second
        from torch._inductor.exc import CppCompileError

        program = self.program()
        known = {name: value for name, value in COMPILER.items() if hasattr(config, name)}
        # Instruction sets are those that torch finds, without a trial of the compiler for each. A
        # compiler may be too old for them.
        for is_known in (True, None):
            try:
                with config.patch(known | {"cpp.vec_isa_ok": is_known}):
                    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
            except CppCompileError:
                if is_known is None:
                    raise
            else:
                return


class Graph:
    """A model's forward graph in pieces."""

    def __init__(self, program: ExportedProgram, max_interpreted: float = MAX_INTERPRETED):
        """Cut the graph, which is changed in place, at its attention operators, or take all of it
        as one piece where that is impossible or takes less time to compile.

        Args:
            program: graph made by ``twin.export_graph``.
            max_interpreted: largest share of pieces that are not compiled.
        """
        self.root = program.graph_module
        graph = self.root.graph
        for node in graph.find_nodes(op="call_function", target=CHECK):
            graph.erase_node(node)
        graph.eliminate_dead_code()
        targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
        self.constants = {
            node: program.constants[targets[node.name]]
            for node in graph.find_nodes(op="placeholder")
            if targets[node.name] in program.constants
        }
        self.inputs = [n for n in graph.find_nodes(op="placeholder") if n not in self.constants]
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        (self.outputs,) = graph.output_node().args
        self.context = next(node for node in self.inputs if node.name == "context")
        try:
            self._compile(self._worthwhile(max_interpreted))
        except (ValueError, RuntimeError):  # the interpreter lacks an operator
            self._compile([])

    def _worthwhile(self, max_interpreted: float) -> list[Piece]:
        """Return the pieces to compile; none if the whole graph takes less time."""
        pieces = [Piece(part, self) for part in self._cut()]
        counts = Counter(piece.key for piece in pieces)
        rare = sorted((each for each in pieces if each.is_simple), key=lambda e: counts[e.key])
        interpreted = rare[: int(max_interpreted * len(pieces))]
        compiled = [piece for piece in pieces if piece not in interpreted]
        num_kinds = len({piece.key for piece in compiled})
        is_less = PACKAGE_S * (num_kinds - 1) <= LAYER_S * (len(compiled) - num_kinds)
        return compiled if is_less else []

    def _compile(self, pieces: list[Piece]) -> None:
        """Set the pieces to compile; without any, the whole graph is one."""
        pieces = pieces or [Piece([node for node in self.nodes if not self.is_copied(node)], self)]
        # One piece of each kind to compile, by its key.
        self.kinds = {piece.key: piece for piece in pieces}
        self.compiled = {piece.first: piece for piece in pieces}
        self.script = self._script()
        torch.jit.CompilationUnit(self.script)

    def _cut(self) -> Cuts:
        """Return the nodes between attention operators."""
        parts: Cuts = [[]]
        for node in self.nodes:
            if is_attention(node):
                parts.append([])
            elif not self.is_copied(node):
                parts[-1].append(node)
        return [part for part in parts if part]

    def is_copied(self, node: fx.Node) -> bool:
        """Return whether each piece that reads a node has its own copy: sizes, constants, modules,
        and the table that is the context."""
        is_fixed = node.op == "get_attr" or node in self.constants or node is self.context
        return is_fixed or is_size(node)

    def _script(self) -> str:
        """Return the graph in TorchScript, a function of its inputs and of the ids of the loaded
        pieces in the order of ``kinds``.
        """
        copy = _Copy(self.inputs, self)
        ids = copy.made.placeholder("pieces")
        kinds = list(self.kinds)
        within = set[fx.Node]().union(*(piece.nodes for piece in self.compiled.values()))
        for node in self.nodes:
            if (piece := self.compiled.get(node)) is not None:
                numbers = [kinds.index(piece.key), *piece.linears]
                arguments = copy(self.context), ids, numbers, list(map(copy, piece.inputs))
                made = copy.made.call_function(torch.ops.hf_slospec.run_piece.default, arguments)
                for i, each in enumerate(piece.outputs):
                    copy.copies[each] = copy.made.call_function(operator.getitem, (made, i))
            elif node not in within and not self.is_copied(node):
                copy(node)
        copy.made.output(list(map(copy, self.outputs)))
        text: str = copy.made.python_code("self").src
        for pattern, replacement in PYTHON.items():
            text = re.sub(pattern, replacement, text)
        return text


class _Copy:
    """A graph of copies of another graph's nodes."""

    def __init__(self, inputs: list[fx.Node], graph: Graph):
        self._inputs = inputs
        self._graph = graph
        self.made = fx.Graph()
        self.copies = {node: self.made.placeholder(f"x{i}") for i, node in enumerate(inputs)}
        self.constants = nn.Module()

    def __call__(self, node: fx.Node) -> fx.Node:
        """Return the copy of a node, without its name."""
        if node not in self.copies:
            op = node.op
            target: Any = node.target
            args: Any = node.args
            if node in self._graph.constants:
                op = "get_attr"
                target = f"c{len(list(self.constants.buffers()))}"
                self.constants.register_buffer(target, self._graph.constants[node])
            elif op == "get_attr":
                setattr(self.constants, target, getattr(self._graph.root, target))
            elif target is SIZE and args[0] not in self.copies:
                args = with_size(node, self._inputs)
            copied: Any = fx.map_arg((args, node.kwargs), self)
            self.copies[node] = self.made.create_node(op, target, *copied)
        return self.copies[node]


def is_attention(node: fx.Node) -> bool:
    return node.target is torch.ops.hf_slospec.attend.default


def is_size(node: fx.Node) -> bool:
    """Return whether a node is a number of tokens, or made of such numbers."""
    return isinstance(node.meta.get("val"), (int, torch.SymInt))


def _is_computed(size: int | torch.SymInt) -> bool:
    return not isinstance(size, int) and not size.node.expr.is_symbol


def with_size(node: fx.Node, tensors: list[fx.Node]) -> tuple[fx.Node, int]:
    """Return a tensor and its dimension that has the size which a ``sym_size`` node reads.

    Raises:
        ValueError: none of the tensors has it.
    """
    size = str(node.meta["val"])
    for tensor in tensors:
        sizes = list(map(str, tensor.meta["val"].shape))
        if size in sizes:
            return tensor, sizes.index(size)
    raise ValueError(f"no tensor has the size {size}")


def _described(inputs: list[fx.Node]) -> list[str]:
    """Return dtypes, shapes and strides, with symbols named by the order in which they occur."""
    symbols = dict[str, str]()
    described = list[str]()
    for value in (node.meta["val"] for node in inputs):
        described.append(str(value.dtype))
        for size in (*value.shape, *value.stride()):
            is_number = isinstance(size, int)
            described.append(
                str(size) if is_number else symbols.setdefault(str(size), f"s{len(symbols)}")
            )
    return described


def _example(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the shape and strides of a traced one."""
    sizes, strides = (
        [each if isinstance(each, int) else each.node.hint for each in of]
        for of in (value.shape, value.stride())
    )
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="cpu")
