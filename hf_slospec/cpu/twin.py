"""A model's forward as a graph for torch's compiler, traced on a copy of the model without weights.

The copy is made of the model's class and config on the meta device, or for this package's own
networks of the modules themselves. Its linear layers and its attention are operators of
:mod:`hf_slospec.cpu`; all other weights are inputs of the graph.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from transformers.pytorch_utils import Conv1D

from hf_slospec.model.attention.hook import AttentionHook, Positions, run_model
from hf_slospec.model.batch import AttentionLayer, AttentionRules
from hf_slospec.model.inputs import ForwardTensors
from hf_slospec.model.properties import config_values
from hf_slospec.model.version import NOT_SETTINGS
from hf_slospec.model.whose_code import library_of

SETTINGS = (
    bool,
    int,
    float,
    str,
    tuple,
)  # types of attributes that are settings, besides dataclasses
UNREAD = NOT_SETTINGS | {
    "config",
    "name_or_path",
}  # the config is described by itself, without the model's path
LINEAR = (nn.Linear, Conv1D)  # classes of layers whose products are operators
MIN_SIZE, MAX_TOKENS = (
    2,
    2**20,
)  # tokens and logits of a forward; the compiler makes another graph for 1
TRACED_TOKENS = 7
TRACED_LOGITS = 5
LORA = "peft.tuners.lora.layer.Linear"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class GraphDescription:
    """Everything that a model's graph depends on."""

    model_class: type[Any]
    config: Any
    modules: dict[
        str, str
    ]  # classes of all modules, by name; of LoRA layers, that of the layer inside
    lora: dict[
        str, dict[str, float]
    ]  # scaling of each adapter that is added, by the name of the LoRA layer
    tensors: dict[str, tuple[torch.dtype, Shape]]  # parameters and buffers, by name
    layers: tuple[AttentionLayer, ...]  # in the order in which the pool stores them
    feature_layers: tuple[int, ...]  # hidden states to return
    keeps_logits: bool  # the model's forward takes logits_to_keep
    input_size: int | None = None  # length of a token's input; None: tokens are ids
    settings: dict[str, str] | None = (
        None  # attributes of modules that are not made of the config alone
    )
    modules_only: bytes | None = (
        None  # the pickled model without weights, if it cannot be made of class and config
    )

    @classmethod
    def of(
        cls,
        model: Any,
        layers: Sequence[AttentionLayer],
        feature_layers: tuple[int, ...],
        keeps_logits: bool,
    ) -> GraphDescription:
        """Return the description of a model as it is now."""
        named = [*model.named_parameters(), *model.named_buffers()]
        lora = _lora_layers(model)
        return cls(
            type(model),
            model.config,
            _module_classes(model, lora),
            lora,
            {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in named},
            tuple(layers),
            feature_layers,
            keeps_logits,
            getattr(model, "packed_input_size", None),
            _settings(model) if _is_own(type(model)) else None,
        )

    def with_modules(self, model: Any) -> GraphDescription:
        """Return this description of a model with all that a process needs to trace its graph."""
        return (
            self if self.settings is None else replace(self, modules_only=_without_weights(model))
        )

    @property
    def input_name(self) -> str:
        """Name of the argument of the model's forward that takes tokens."""
        return "input_ids" if self.input_size is None else "inputs_embeds"

    @property
    def sources(self) -> list[str]:
        """Sources of this package that the graph was made from, besides the operators' and this
        file's.
        """
        if self.settings is None:
            return []
        files = {
            str(sys.modules[kind.__module__].__file__)
            for kind in self.model_class.__mro__
            if _is_own(kind)
        }
        return [Path(file).read_text(encoding="utf-8") for file in sorted(files)]

    def twin(self) -> Any:
        """Return a copy of the model on the meta device."""
        if self.modules_only is not None:
            return pickle.loads(self.modules_only).eval()
        if self.settings is not None:
            raise ValueError("its modules cannot be pickled")
        with torch.device("meta"):
            return self.model_class(self.config).eval()

    def identity(self) -> dict[str, Any]:
        """Return what identifies the graph, as values for JSON."""
        config = config_values(self.config)
        name = f"{self.model_class.__module__}.{self.model_class.__qualname__}"
        layers = [str(layer) for layer in self.layers]
        return {
            "class": name,
            "config": config,
            "modules": self.modules,
            "tensors": self.tensors,
            "layers": layers,
        } | {
            "feature_layers": self.feature_layers,
            "settings": self.settings,
            "lora": self.lora,
        }


def _module_classes(model: nn.Module, lora: Collection[str] = ()) -> dict[str, str]:
    """Return the classes of all modules by name, as they would be without adapters in the layers
    ``lora``.
    """
    classes = dict[str, str]()
    inside: str | None = None  # prefix of the names inside of a LoRA layer
    for name, module in model.named_modules():
        if inside is None or not name.startswith(inside):
            inside = f"{name}." if name in lora else None
            classes[name] = _class_name(
                module.get_submodule("base_layer") if name in lora else module
            )
    return classes


def _class_name(module: nn.Module) -> str:
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def _lora_layers(model: nn.Module) -> dict[str, dict[str, float]]:
    """Return :attr:`GraphDescription.lora` of a model, without layers that compute otherwise: it
    lacks these.
    """
    scalings = dict[str, dict[str, float]]()
    for name, module in model.named_modules():
        if _class_name(module) != LORA:
            continue
        layer: Any = module
        is_other = (
            layer.lora_variant
            or any(layer.lora_bias.values())
            or type(layer.base_layer) not in LINEAR
        )
        is_to_be_unmerged = layer.merged and layer.disable_adapters  # by its next forward
        if not (
            is_other or is_to_be_unmerged or not getattr(layer, "cast_input_dtype_enabled", True)
        ):
            added = () if layer.merged or layer.disable_adapters else layer.active_adapters
            scalings[name] = {
                adapter: layer.scaling[adapter] for adapter in added if adapter in layer.lora_A
            }
    return scalings


def _is_own(kind: type[Any]) -> bool:
    """Return whether a class is one of this package, as those of draft heads."""
    return library_of(kind) == "hf_slospec"


def _settings(model: nn.Module) -> dict[str, str]:
    """Return the plain attributes of all modules, by name."""
    return {
        f"{name}.{attribute}": repr(value)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if attribute not in UNREAD and (isinstance(value, SETTINGS) or is_dataclass(value))
    }


def _without_weights(model: nn.Module) -> bytes | None:
    """Return the pickled modules, with tensors on the meta device; None if they cannot be pickled."""
    file = io.BytesIO()
    try:
        _ModulesPickler(file).dump(model)
    except (
        pickle.PicklingError,
        TypeError,
        AttributeError,
    ):  # locks, or functions that were defined in others
        return None
    return file.getvalue()


class _ModulesPickler(pickle.Pickler):
    """Pickler that leaves out the values of tensors."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _on_meta, (isinstance(value, nn.Parameter), tuple(value.shape), value.dtype)
        return NotImplemented


def _on_meta(is_parameter: bool, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


@dataclass(frozen=True)
class Interface:
    """Inputs of a graph, by the names that the model's modules and weights have."""

    weights: list[str]  # parameters and buffers that are inputs
    linears: list[
        list[str]
    ]  # linear layers by their index in the graph; those of one list are joined


class TracedForward(AttentionHook):
    """Hook of a model while its graph is traced."""

    def __init__(
        self, context: torch.Tensor, layers: Sequence[AttentionLayer], position_ids: torch.Tensor
    ):
        self._context = context  # [1] int64, the id of a Context
        self._layers = {layer.layer_idx: (index, layer) for index, layer in enumerate(layers)}
        self.positions = Positions(position_ids)
        self._layer_of: dict[
            tuple[int, int], int
        ] = {}  # (id(K), id(V)) -> layer_idx; layers may share K and V
        self._held: list[torch.Tensor] = []  # keeps these ids from being reused for other tensors
        self._staged = set[int]()

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep whose K and V these are, each [1, num_kv_heads, num_tokens, dim]; attention stages
        them.
        """
        self._layer_of[id(key), id(value)] = layer_idx
        self._held += key, value
        return key, value

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
        *_: Any,
    ) -> torch.Tensor:
        """Return attention of the layer that cached these K and V.  -> [1, num_tokens, num_heads,
        value_dim]
        """
        index, layer = self._layers[self._layer_of[id(key), id(value)]]
        is_first = index not in self._staged
        self._staged.add(index)
        attended: torch.Tensor = torch.ops.hf_slospec.attend(
            query, key, value, self._context, index, is_first, rules.scaling,
            layer.window or 0, layer.chunk or 0, rules.softcap or 0.0, rules.sinks,
        )  # fmt: skip
        return attended


class _TracedLinear(nn.Module):
    """Linear layer that calls the operator."""

    def __init__(self, step: _Step, name: str, outputs: int, bias: torch.Tensor | None = None):
        super().__init__()
        # in a list: the step is no submodule
        self._step = [step]
        self._index = len(step.linears)
        self._outputs = outputs
        self.bias = bias
        step.linears.append(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.hf_slospec.linear(
            x, self._step[0].traced.context, self._index, self._outputs
        )
        return out if self.bias is None else out + self.bias


class _TracedLoRA(nn.Module):
    """Linear layer with adapters that are added to it."""

    def __init__(self, step: _Step, name: str, base: _TracedLinear, scalings: dict[str, float]):
        super().__init__()
        self.base_layer = base
        self._added = list[tuple[nn.Module, nn.Module, torch.dtype, float]]()
        for adapter, scaling in scalings.items():
            names = [f"{name}.{part}.{adapter}" for part in ("lora_A", "lora_B")]
            (dtype, (rank, _)), (_, (outputs, _)) = (
                step.description.tensors[f"{each}.weight"] for each in names
            )
            parts = _TracedLinear(step, names[0], rank), _TracedLinear(step, names[1], outputs)
            self._added.append((*parts, dtype, scaling))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        dtype = out.dtype
        for down, up, own_dtype, scaling in self._added:
            x = x.to(own_dtype)
            out = out + up(down(x)) * scaling
        return out.to(dtype)


class _Step(nn.Module):
    """The packed forward of a model, with tensors as its arguments only."""

    def __init__(self, description: GraphDescription):
        super().__init__()
        # names by index
        self.description = description
        self.linears = list[str]()
        self.traced = SimpleNamespace(
            context=None
        )  # the traced forward's; export inspects tensors in lists
        twin = description.twin()
        if (modules := _module_classes(twin)) != description.modules:
            changed = sorted(name for name, _ in modules.items() ^ description.modules.items())
            raise ValueError(
                f"modules were changed since the model was made: {', '.join(changed[:5])}"
            )
        for name in [name for name, module in twin.named_modules() if type(module) in LINEAR]:
            parent, _, attribute = name.rpartition(".")
            holder = twin.get_submodule(parent)
            setattr(holder, attribute, self._traced(name, getattr(holder, attribute)))
        named = [*twin.named_parameters(), *twin.named_buffers()]
        self.weights = [name for name, _ in named]
        if missing := [name for name in self.weights if name not in description.tensors]:
            raise ValueError(f"the model has no {', '.join(missing[:5])}")
        self._twin = [twin]  # in a list: its weights are arguments

    def _traced(self, name: str, layer: Any) -> nn.Module:
        outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.nf
        if (scalings := self.description.lora.get(name)) is None:
            return _TracedLinear(self, name, outputs, layer.bias)
        return _TracedLoRA(
            self, name, _TracedLinear(self, f"{name}.base_layer", outputs, layer.bias), scalings
        )

    def forward(
        self,
        # [1, num_tokens] int64 or, if the model's inputs are no ids, [1, num_tokens, input_size]
        tokens: torch.Tensor,
        position_ids: torch.Tensor,  # [1, num_tokens] int64
        logit_rows: torch.Tensor,  # [num_logits] int64
        context: torch.Tensor,  # [1] int64
        weights: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Return logits [num_logits, vocab], and features [num_tokens, num_feature_layers * hidden]
        if any.
        """
        self.traced.context = context
        described = self.description
        twin = self._twin[0]
        forward = TracedForward(context, described.layers, position_ids)
        named = {described.input_name: tokens}
        tensors = ForwardTensors(named, position_ids, logit_rows, {}, described.feature_layers)
        options = tensors.model_options(described.keeps_logits)
        with nn.utils.stateless._reparametrize_module(
            twin, dict(zip(self.weights, weights, strict=True))
        ):
            output = run_model(twin, forward, position_ids, **named, **options)
        outputs = tensors.outputs(output, described.keeps_logits)
        return tuple(tensor for tensor in outputs if tensor is not None)


@torch.no_grad()
def export_graph(description: GraphDescription) -> tuple[ExportedProgram, Interface]:
    """Return the graph of a model's packed forward; the operators' library must be loaded.

    Raises:
        Exception: the model cannot be traced, for many reasons.
    """
    step = _Step(description)
    weights = [
        torch.zeros(shape, dtype=dtype, device="cpu")
        for dtype, shape in (description.tensors[name] for name in step.weights)
    ]
    size = description.input_size
    dtype = next(iter(description.tensors.values()))[0]
    traced = (
        torch.zeros(1, TRACED_TOKENS, dtype=torch.int64, device="cpu")
        if size is None
        else torch.zeros(1, TRACED_TOKENS, size, dtype=dtype, device="cpu")
    )
    tokens, logits = (
        Dim("tokens", min=MIN_SIZE, max=MAX_TOKENS),
        Dim("logits", min=MIN_SIZE, max=MAX_TOKENS),
    )
    arguments = (
        traced,
        torch.arange(TRACED_TOKENS, device="cpu")[None],
        torch.arange(TRACED_LOGITS, device="cpu"),
        torch.zeros(1, dtype=torch.int64, device="cpu"),
        weights,
    )
    shapes = {1: tokens}, {1: tokens}, {0: logits}, None, [None] * len(weights)
    program = export(step, arguments, dynamic_shapes=shapes, strict=False)
    linears = _join_linears(program, step.linears)
    return program, Interface(step.weights, linears)


def _join_linears(program: ExportedProgram, names: Sequence[str]) -> list[list[str]]:
    """Replace linear layers of one input by one, and number them anew; return their names by
    number.
    """
    graph = program.graph_module.graph
    by_input = defaultdict[Any, list[Any]](list)
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.hf_slospec.linear.default:
            by_input[node.args[0]].append(node)
    linears = list[list[str]]()
    for nodes in by_input.values():
        x, context = nodes[0].args[:2]  # the input may be an output of a joined layer by now
        outputs = [node.args[3] for node in nodes]
        index = len(linears)
        linears.append([names[node.args[2]] for node in nodes])
        if len(nodes) == 1:
            nodes[0].args = x, context, index, outputs[0]
            continue
        with graph.inserting_before(nodes[0]):
            joined = graph.call_function(
                torch.ops.hf_slospec.linear.default, (x, context, index, sum(outputs))
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
