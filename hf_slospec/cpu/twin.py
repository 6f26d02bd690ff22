"""Tracing of a model's forward into a graph for torch's compiler, on a twin: a copy of the model
without weights.

The twin is made from the model's class and config on the meta device; for this package's own
networks, such as draft heads, from pickled modules. In the graph, linear layers and attention are
operators of operators.cpp, which find weights and K/V by themselves; other weights are inputs.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from transformers.pytorch_utils import Conv1D

from hf_slospec.cpu.joined_linears import join_linears
from hf_slospec.cpu.pieces import MAX_TOKENS, MIN_SIZE
from hf_slospec.cpu.quantised_weight import QuantisedWeight
from hf_slospec.model.attention.hook import AttentionHook, Positions, run_model
from hf_slospec.model.batch import AttentionLayer, AttentionRules
from hf_slospec.model.inputs import ForwardTensors
from hf_slospec.model.properties import config_values
from hf_slospec.model.version import NOT_SETTINGS
from hf_slospec.model.whose_code import library_of

SETTINGS = (bool, int, float, str, tuple)  # types of the modules' attributes that a graph may read
# Attributes that are not compared; the config is compared separately, without the model's path.
UNREAD = NOT_SETTINGS | {"config", "name_or_path"}
LINEAR = (nn.Linear, Conv1D)  # classes of layers that the `context_linear` operator replaces
TRACED_TOKENS = 7
TRACED_LOGITS = 5
LORA = "peft.tuners.lora.layer.Linear"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class GraphDescription:
    """Everything that a model's graph depends on."""

    model_class: type[Any]
    config: Any
    # Module name -> class name; for LoRA layers, the class name of the base layer.
    modules: dict[str, str]
    # Name of a LoRA layer -> name of an active adapter -> its scaling.
    lora: dict[str, dict[str, float]]
    tensors: dict[str, tuple[torch.dtype, Shape]]  # parameters and buffers, by name
    layers: tuple[AttentionLayer, ...]  # in the order in which the pool stores them
    feature_layers: tuple[int, ...]  # layers whose hidden states are returned
    keeps_logits: bool  # the model's forward takes logits_to_keep
    input_size: int | None  # size of a token's embedding; None: tokens are ids
    # Name of a module's attribute -> repr of its value; None unless the class is this package's.
    settings: dict[str, str] | None
    quantised: frozenset[str] = frozenset()  # names of tensors that stay packed
    is_invariant: bool = False  # a token's bits must not depend on the number of tokens
    modules_only: bytes | None = None  # the pickled modules without weights, if there are settings

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
            _settings(model) if _is_ours(type(model)) else None,
            frozenset(name for name, tensor in named if isinstance(tensor, QuantisedWeight)),
        )

    def with_modules(self, model: Any) -> GraphDescription:
        """Return a copy with the pickled modules, if another process needs them for tracing."""
        if self.settings is None:
            return self
        return replace(self, modules_only=_without_weights(model))

    @property
    def input_name(self) -> str:
        """Name of the argument of the model's forward that takes tokens."""
        return "input_ids" if self.input_size is None else "inputs_embeds"

    @property
    def sources(self) -> list[str]:
        """Source texts of those of the model's classes that are defined in this package."""
        files = {
            str(sys.modules[kind.__module__].__file__)
            for kind in self.model_class.__mro__
            if _is_ours(kind)
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
        """Return the values that identify the graph in a cache key, as they are written to JSON."""
        return {
            "class": _name_of(self.model_class),
            "config": config_values(self.config),
            "modules": self.modules,
            "tensors": self.tensors,
            "layers": [str(layer) for layer in self.layers],
            "feature_layers": self.feature_layers,
            "settings": self.settings,
            "lora": self.lora,
            "quantised": sorted(self.quantised),
            "is_invariant": self.is_invariant,
        }


def _module_classes(model: nn.Module, lora: Collection[str] = ()) -> dict[str, str]:
    """Return all modules' class names by module name, without adapters in the layers ``lora``."""
    classes = dict[str, str]()
    prefixes = tuple(f"{name}." for name in lora)  # prefixes of modules in LoRA layers
    for name, module in model.named_modules():
        if not name.startswith(prefixes):
            layer = module.get_submodule("base_layer") if name in lora else module
            classes[name] = _name_of(type(layer))
    return classes


def _name_of(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _lora_layers(model: nn.Module) -> dict[str, dict[str, float]]:
    """Return :attr:`GraphDescription.lora` of a model, without layers that compute more than the
    base layer and scaled adapters.
    """
    scalings = dict[str, dict[str, float]]()
    layer: Any
    for name, layer in model.named_modules():
        if (
            _name_of(type(layer)) == LORA
            and not layer.lora_variant
            and not any(layer.lora_bias.values())
            and type(layer.base_layer) in LINEAR
            and not (layer.merged and layer.disable_adapters)  # its next forward unmerges it
            and getattr(layer, "cast_input_dtype_enabled", True)
        ):
            added = () if layer.merged or layer.disable_adapters else layer.active_adapters
            scalings[name] = {
                adapter: layer.scaling[adapter] for adapter in added if adapter in layer.lora_A
            }
    return scalings


def _is_ours(kind: type[Any]) -> bool:
    """Return whether a class is defined in this package, as those of draft heads are."""
    return library_of(kind) == "hf_slospec"


def _settings(model: nn.Module) -> dict[str, str]:
    """Return the repr of all modules' attributes with types in ``SETTINGS``, by attribute name."""
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
    # Raised for locks, and for functions that were defined inside of others.
    except (pickle.PicklingError, TypeError, AttributeError):
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


class TracedForward(AttentionHook):
    """Attention hook that calls the ``attend`` operator, while a model's graph is traced."""

    def __init__(
        self, context: torch.Tensor, layers: Sequence[AttentionLayer], position_ids: torch.Tensor
    ):
        self._context = context  # [1] int64, the id of a Context
        self._layers = {layer.layer_idx: (index, layer) for index, layer in enumerate(layers)}
        self.positions = Positions(position_ids)
        # (id(K), id(V)) -> layer_idx; layers may share K and V
        self._layer_of: dict[tuple[int, int], int] = {}
        self._held: list[torch.Tensor] = []  # keeps these ids from being reused for other tensors
        self._staged = set[int]()

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the layer that computed K and V [1, num_kv_heads, num_tokens, dim], which the
        operator stages.
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
        """Return attention of the layer that computed ``key`` and ``value``.  -> [1, num_tokens,
        num_heads, value_dim]
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
    """Linear layer that calls the ``context_linear`` operator, which has the weight."""

    def __init__(self, step: _Step, name: str, outputs: int, bias: torch.Tensor | None = None):
        super().__init__()
        # In a list, so that the step does not become a submodule.
        self._step = [step]
        self._index = len(step.linears)
        self._outputs = outputs
        self.bias = bias
        step.linears.append(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if all(isinstance(size, int) for size in x.shape[:-1]):
            # The operator takes two rows for one token with its padding.
            raise ValueError(f"a linear layer has an input of {list(x.shape)} in every forward")
        out: torch.Tensor = torch.ops.hf_slospec.context_linear(
            x, self._step[0].traced.context, self._index, self._outputs
        )
        return out if self.bias is None else out + self.bias


class _TracedEmbedding(nn.Embedding):
    """Embedding that calls the ``embedding`` operator, which has the quantised weight."""

    @staticmethod
    def replace(step: _Step, name: str, part: nn.Embedding) -> None:
        """Change the class of an embedding, whose own forward may scale what this one returns."""
        kind = type(part)
        bases = (_TracedEmbedding,) if kind is nn.Embedding else (kind, _TracedEmbedding)
        part.__class__ = type(kind.__name__, bases, {})
        del part.weight
        dtype, _ = step.description.tensors[f"{name}.weight"]
        vars(part)["weight"] = torch.zeros(1, dtype=dtype, device="cpu")  # models read its dtype
        vars(part)["step"] = step
        vars(part)["index"] = len(step.linears)
        step.linears.append(name)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        own = vars(self)
        rows: torch.Tensor = torch.ops.hf_slospec.embedding(
            indices, own["step"].traced.context, own["index"], self.embedding_dim, self.weight.dtype
        )
        return rows


class _TracedLoRA(nn.Module):
    """LoRA layer whose base layer and adapters call the ``context_linear`` operator."""

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
        for down, up, adapter_dtype, scaling in self._added:
            x = x.to(adapter_dtype)
            out = out + up(down(x)) * scaling
        return out.to(dtype)


class _Step(nn.Module):
    """Module whose forward is a model's packed forward with tensors as its only arguments."""

    def __init__(self, description: GraphDescription):
        super().__init__()
        self.description = description
        self.linears = list[str]()  # names by index
        # Holds the forward's context, in a namespace, as export would inspect a list.
        self.traced = SimpleNamespace(context=None)
        twin = description.twin()
        if (modules := _module_classes(twin)) != description.modules:
            changed = sorted({name for name, _ in modules.items() ^ description.modules.items()})
            raise ValueError(
                f"modules were changed since the model was made: {', '.join(changed[:5])}"
            )
        for name in [name for name, module in twin.named_modules() if type(module) in LINEAR]:
            parent, _, attribute = name.rpartition(".")
            holder = twin.get_submodule(parent)
            setattr(holder, attribute, self._traced(name, getattr(holder, attribute)))
        for name, part in list(twin.named_modules()):
            if isinstance(part, nn.Embedding) and f"{name}.weight" in description.quantised:
                _TracedEmbedding.replace(self, name, part)
        named = [*twin.named_parameters(), *twin.named_buffers()]
        self.weights = [name for name, _ in named]
        if missing := [name for name in self.weights if name not in description.tensors]:
            raise ValueError(f"the model has no {', '.join(missing[:5])}")
        self._twin = [twin]  # in a list, so that its weights are not the step's

    def _traced(self, name: str, layer: Any) -> nn.Module:
        outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.nf
        if (scalings := self.description.lora.get(name)) is None:
            return _TracedLinear(self, name, outputs, layer.bias)
        return _TracedLoRA(
            self, name, _TracedLinear(self, f"{name}.base_layer", outputs, layer.bias), scalings
        )

    def forward(
        self,
        # Token ids [1, num_tokens] int64, or embeddings [1, num_tokens, input_size].
        tokens: torch.Tensor,
        position_ids: torch.Tensor,  # [1, num_tokens] int64
        logit_rows: torch.Tensor,  # [num_logits] int64: tokens whose logits are returned
        context: torch.Tensor,  # [1] int64, the id of a Context
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
def export_graph(
    description: GraphDescription,
) -> tuple[ExportedProgram, list[str], list[list[str]]]:
    """Return the graph of a model's packed forward; the operators must be defined.

    Returns:
        The graph, the names of the weights among its inputs, and the names of the layers that each
        of its ``context_linear`` operators computes.

    Raises:
        Exception: the model cannot be traced; torch raises errors of many classes.
    """
    step = _Step(description)
    weights = [
        torch.zeros(shape, dtype=dtype, device="cpu")
        for dtype, shape in (description.tensors[name] for name in step.weights)
    ]
    shape: Shape = (1, TRACED_TOKENS)
    dtype = torch.int64
    if description.input_size is not None:
        shape = (*shape, description.input_size)
        dtype = next(iter(description.tensors.values()))[0]
    traced = torch.zeros(shape, dtype=dtype, device="cpu")
    tokens, logits = (Dim(name, min=MIN_SIZE, max=MAX_TOKENS) for name in ("tokens", "logits"))
    arguments = (
        traced,
        torch.arange(TRACED_TOKENS, device="cpu")[None],
        torch.arange(TRACED_LOGITS, device="cpu"),
        torch.zeros(1, dtype=torch.int64, device="cpu"),
        weights,
    )
    shapes = {1: tokens}, {1: tokens}, {0: logits}, None, [None] * len(weights)
    program = export(step, arguments, dynamic_shapes=shapes, strict=False)
    return program, step.weights, join_linears(program, step.linears)
