"""A model's forward graph in pieces, cut at its attention operators. Layers that are alike give
pieces that are alike, of which the compiler gets one.

The graph becomes a TorchScript function, whose interpreter in C++ calls compiled pieces and the
operators between them. Rare pieces, such as the first and the last one of a deep model, are not
compiled: their operators are a part of the function.
"""

from __future__ import annotations

import operator
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._inductor
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export

from hf_slospec.model.machine import digest

# Share of a graph's pieces that may be interpreted: one takes longer than it would take compiled,
# but little of a forward.
MAX_INTERPRETED = 0.125
# Numbers of tokens and of logits that a graph takes; for 1, the compiler would make another graph.
MIN_SIZE = 2
MAX_TOKENS = 2**20
ARITHMETIC = {
    operator.add: "aten::add",
    operator.sub: "aten::sub",
    operator.mul: "aten::mul",
    operator.floordiv: "aten::floordiv",
}
SIZE = torch.ops.aten.sym_size.int
CHECK = torch.ops.aten._assert_tensor_metadata.default  # of what the compiler knows
FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1}  # numbers in TorchScript
# Settings of torch's compiler. Its wrapper calls kernels and operators, and is quick enough without
# optimisation; a precompiled header takes longer than one package gains by it.
COMPILER: dict[str, Any] = {
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": False,
    "aot_inductor.enable_line_tables": False,
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
        self.linears = list[int]()  # index of each `linear` operator in the model
        made = fx.Graph()
        copies = {node: made.placeholder(f"x{i}") for i, node in enumerate(self.inputs)}
        constants = nn.Module()

        def copy(node: Any) -> fx.Node:
            if node in copies:
                return copies[node]
            if node.op == "get_attr":
                setattr(constants, node.target, getattr(graph.root, node.target))
            elif node in graph.constants:
                name = f"c{len(list(constants.buffers()))}"
                constants.register_buffer(name, graph.constants[node])
                copies[node] = made.get_attr(name)
                return copies[node]
            elif node.target is SIZE and node.args[0] not in self.nodes:
                tensor, dim = with_size(node, self.inputs)
                copies[node] = made.call_function(SIZE, (copies[tensor], dim))
                return copies[node]
            copies[node] = made.node_copy(node, copy)
            return copies[node]

        table = copies[graph.context] = made.placeholder("table")
        for node in nodes:
            copied = copy(node)
            if table in copied.all_input_nodes and not is_attention(node):
                place = copied.args.index(table) + 1  # of the linear layer's index
                index: Any = copied.args[place]
                copied.args = (*copied.args[:place], len(self.linears), *copied.args[place + 1 :])
                self.linears.append(index)
        made.output(tuple(copies[node] for node in self.outputs))
        self.module = fx.GraphModule(constants, made)
        numbers = {node: f"%{i}" for i, node in enumerate(made.nodes)}
        operators = [
            str(
                fx.map_arg([node.op, str(node.target), node.args, node.kwargs], numbers.__getitem__)
            )
            for node in made.nodes
        ]
        constant = [value.tolist() for value in constants.buffers()]
        inner = [str(getattr(module, "code", module)) for module in constants.children()]
        self.key = digest([operators, constant, inner, _described(self.inputs)])

    @property
    def is_simple(self) -> bool:
        """Return whether the interpreter has all its operators."""
        known = all(
            isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
            for node in self.nodes
        )
        return known and not list(self.module.buffers())

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
            settings = known | {"cpp.vec_isa_ok": is_known}
            try:
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(path), inductor_configs=settings
                )
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
            compiled = self._frequent([Piece(part, self) for part in self._cut()], max_interpreted)
        except ValueError:
            compiled = []
        num_kinds = len({piece.key for piece in compiled})
        if PACKAGE_S * (num_kinds - 1) > LAYER_S * (len(compiled) - num_kinds) or not compiled:
            compiled = [Piece([node for node in self.nodes if not self.is_copied(node)], self)]
        self.compiled = {piece.first: piece for piece in compiled}
        # One piece of each kind to compile, by its key.
        self.kinds = {piece.key: piece for piece in compiled}

    @staticmethod
    def _frequent(pieces: list[Piece], max_interpreted: float) -> list[Piece]:
        """Return the pieces to compile."""
        counts = Counter(piece.key for piece in pieces)
        simple = sorted(
            (piece for piece in pieces if piece.is_simple), key=lambda piece: counts[piece.key]
        )
        interpreted = simple[: int(max_interpreted * len(pieces))]
        return [piece for piece in pieces if piece not in interpreted]

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

    @property
    def script(self) -> str:
        """The graph in TorchScript's representation: its inputs, and the ids of the loaded pieces
        in the order of ``kinds``.
        """
        return _Script(self).text


class _Script:
    """Writer of a graph in TorchScript's representation."""

    def __init__(self, graph: Graph):
        self._inputs = graph.inputs
        self._lines = list[str]()
        # Name of each value; for operators with several results, a list of names.
        self._names: dict[fx.Node, Any] = {node: f"%i{i}" for i, node in enumerate(graph.inputs)}
        kinds = list(graph.kinds)
        within = set[fx.Node]().union(*(piece.nodes for piece in graph.compiled.values()))
        for node in graph.nodes:
            if (piece := graph.compiled.get(node)) is not None:
                kind = self._constant("int", kinds.index(piece.key))
                tensors = [self._names[each] for each in piece.inputs]
                indices = [self._constant("int", index) for index in piece.linears]
                made = self._call(
                    "Tensor[]",
                    "hf_slospec::run_piece",
                    self._call("int", "aten::__getitem__", "%pieces", kind),
                    self._names[graph.context],
                    self._list("int", indices),
                    self._list("Tensor", tensors),
                )
                for i, each in enumerate(piece.outputs):
                    self._names[each] = f"{made}_{i}"
                results = ", ".join(f"{self._names[each]} : Tensor" for each in piece.outputs)
                self._lines.append(f"{results} = prim::ListUnpack({made})")
            elif node.op == "call_function" and node not in within and not is_size(node):
                self._names[node] = self._result(node)
        returned = self._list("Tensor", [self._names[node] for node in graph.outputs])
        head = "".join(f"{self._names[node]} : Tensor, " for node in graph.inputs)
        body = "".join(f"  {line}\n" for line in self._lines)
        self.text = f"graph({head}%pieces : int[]):\n{body}  return ({returned})\n"

    def _call(self, kind: str, name: str, *arguments: str) -> str:
        made = f"%v{len(self._lines)}"
        self._lines.append(f"{made} : {kind} = {name}({', '.join(arguments)})")
        return made

    def _list(self, kind: str, values: list[str]) -> str:
        return self._call(f"{kind}[]", "prim::ListConstruct", *values)

    def _constant(self, kind: str, value: Any) -> str:
        return self._call(kind, f"prim::Constant[value={value}]")

    def _result(self, node: Any) -> Any:
        """Write an operator, and return the name of its result, or a list of names."""
        kind = "int" if is_size(node) else "Tensor"
        if node.target is SIZE:
            tensor, dim = with_size(node, self._inputs)
            return self._call(kind, "aten::size", self._names[tensor], self._constant("int", dim))
        if node.target is operator.getitem:
            of, index = node.args
            names = self._names[of]
            if isinstance(names, list):
                return names[index]
            return self._call(kind, "aten::__getitem__", names, self._constant("int", index))
        if node.target in ARITHMETIC:
            return self._call(
                kind, ARITHMETIC[node.target], *(self._value(each, "int") for each in node.args)
            )
        schema = node.target._schema
        given = dict(zip((each.name for each in schema.arguments), node.args, strict=False))
        given |= node.kwargs
        values = [
            self._value(given.get(each.name, each.default_value), str(each.type))
            for each in schema.arguments
        ]
        kinds = [_written(str(each.type)) for each in schema.returns]
        made = self._call(kinds[0], schema.name, *values)
        if len(kinds) == 1:
            return made
        names = [made, *(f"{made}_{i}" for i in range(1, len(kinds)))]
        typed = ", ".join(f"{name} : {kind}" for name, kind in zip(names, kinds, strict=True))
        self._lines[-1] = f"{typed} = {schema.name}({', '.join(values)})"
        return names

    def _value(self, value: Any, kind: str) -> str:
        """Write an argument of a type of an operator's schema, and return its name."""
        kind = _within(kind, "Optional")
        if isinstance(value, fx.Node):
            if value not in self._names:  # sizes are read where they are used
                self._names[value] = self._result(value)
            name: str = self._names[value]
            return name
        if value is None:
            return self._call("NoneType", "prim::Constant")
        if isinstance(value, (list, tuple)):
            element = _within(kind, "List")
            values = [self._value(each, element) for each in value]
            return self._list(_written(element), values)
        if isinstance(value, torch.device):
            return self._constant("Device", f'"{value}"')
        if isinstance(value, str):
            return self._constant("str", f'"{value}"')
        if isinstance(value, bool):
            return self._constant("bool", int(value))
        if isinstance(value, float) or kind.startswith("float"):
            return self._constant("float", repr(float(value)))
        if not isinstance(value, int):
            value = FORMATS[value] if value in FORMATS else _number(value)
        return self._constant("int", value)


def _number(value: torch.dtype | torch.layout) -> int:
    graph: Any = torch._C.Graph()
    constant = graph.insertConstant(value)
    number: int = constant.toIValue()
    return number


def _written(kind: str) -> str:
    """Return a type of an operator's schema as graphs have it: Tensor, Tensor?, Tensor[], int."""
    for outer, suffix in (("List", "[]"), ("Optional", "?")):
        if (element := _within(kind, outer)) != kind:
            return _written(element) + suffix
    return kind


def _within(kind: str, outer: str) -> str:
    """Return the type in brackets behind the name of another one, if this is its name."""
    return kind[len(outer) + 1 : -1] if kind.startswith(f"{outer}[") else kind


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
    """Return zeros with the shape and strides of a traced tensor."""
    sizes, strides = (
        [each if isinstance(each, int) else each.node.hint for each in of]
        for of in (value.shape, value.stride())
    )
    num_elements = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    return torch.zeros(num_elements, dtype=value.dtype, device="cpu").as_strided(sizes, strides)
