"""Counters of changes to a model's weights, modules and structure. Objects made from a model keep
the counters they were made at, to notice that they are outdated.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_slospec.forks import Lock, reset_in_children
from hf_slospec.model.checksum import (
    PLAIN,
    Digest,
    State,
    component_reader,
    digest,
    is_packed,
    state_of,
)
from hf_slospec.model.linear_overrides import (
    all_modules,
    container_kind,
    is_temporary,
    items_of,
)
from hf_slospec.model.whose_code import changing_hooks, is_unchanging, library_of

_num_writes = 0
_num_told = 0


def weights_changed() -> None:
    """Count every model as changed, so that its weights are read again before its next step.

    The next call notices most changes by itself. This function is needed after changes that leave
    no trace: writes through ``weight.data``, or to weights offloaded to a disk, if no parameter of
    the model requires a gradient or submitted requests are running; and changes of what hooks read
    from elsewhere, such as the strength of a steering vector.
    """
    global _num_told
    _num_told += 1
    _count_write()


def _count_write(*_: object) -> None:
    global _num_writes
    _num_writes += 1


# A step of any optimizer counts as a change of every model: weights that are not trained may be
# copies or averages of trained ones.
register_optimizer_step_post_hook(_count_write)


# Attributes of modules and configs whose changes do not count as changes of a model:
# - training mode: models that compute differently in it (dropout, gradient checkpointing) are
#   refused;
# - the config's attention implementation, which packed forwards replace;
# - parameters and buffers, which are read separately;
# - what stock `generate` keeps for its next call (`rope_deltas`, a compiled forward, a manager of
#   continuous batching), methods that `enable` replaces, what trainers set (generation config,
#   `use_cache`, `warnings_issued`), and hooks of gradients and state dicts: packed forwards read
#   none of these.
IGNORED = {
    "training",
    "_attn_implementation_internal",
    "_parameters",
    "_buffers",
    "rope_deltas",
    "generate",
    "generate_batch",
    "init_continuous_batching",
    "generation_config",
    "use_cache",
    "warnings_issued",
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_cached_continuous_batching_manager",
    "_compiled_call",
    "_last_compile_config",
    "_previous_max_cache_length",
    *(name for name in vars(torch.nn.Module()) if "backward" in name or "state_dict" in name),
}
# Further attributes that are no settings: submodules and hooks, which are read separately.
NOT_SETTINGS = IGNORED | {
    "_modules",
    *(name for name in vars(torch.nn.Module()) if "hooks" in name),
}
# Libraries that build models; modules of other libraries are adapters, or written by users.
BUILDERS = ("torch", "transformers")
# Types of most attribute values; such values contain no other objects.
SIMPLE = frozenset((type(None), bool, int, float, str, *PLAIN))
_count_of_writes: Callable[[Any], int] = operator.attrgetter("_version")


class ModelVersion:
    """Counters of changes to a model.

    ``weights`` counts all changes; ``modules`` counts changes of attributes of modules and configs,
    of submodules and of hooks; ``structure`` counts changes of submodules and hooks only.
    ``storage`` counts what ``modules`` counts, and changes of the addresses of weights, which CUDA
    graphs contain.

    Attributes are compared by identity: an attribute that is replaced by an equal object counts as
    changed.
    """

    all_parts: list[Any]  # the model and all its modules
    _structure: list[Any]
    _adapter_attributes: list[Any]
    _places: tuple[tuple[int, ...], ...]

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._held = _Held()
        self._held_by_adapters = _Held()
        self.weights = 0
        self.storage = 0
        self.modules = 0
        self.structure = 0
        self._lock = Lock()
        self._renewing = Lock()
        self._states: tuple[State, ...] = ()
        self._digest: Digest | None = None
        self._num_writes = _num_writes
        self._num_told = _num_told
        self._read_modules()
        weights = self._read_attributes()
        self._read_weights(weights, self._may_be_written(weights))
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Count the model as changed, as another thread may have counted only half of a change when
        the process was forked.
        """
        self.count(structure=True)

    @property
    def is_behind(self) -> bool:
        """Return whether an optimizer has stepped or :func:`weights_changed` was called since the
        last :meth:`renew`.
        """
        return self._num_writes != _num_writes

    def renew(self, is_idle: bool = True) -> bool:
        """Read the whole model, and count the changes since the last call.

        Args:
            is_idle: no request runs, so that there is time to compare the bits of weights that may
                be written without a trace.

        Returns:
            Whether the model has changed.
        """
        with self._renewing:
            attributes = self._attributes
            structure = self._structure
            with self._lock:
                self._read_modules()
            weights = self._read_attributes()
            has_other_modules = not are_same(attributes, self._attributes)
            if has_other_modules:  # counted before the weights are read, as that may raise an error
                self.count(structure=not are_same(structure, self._structure))
            previous = self._states
            has_changed = self._read_weights(weights, is_idle and self._may_be_written(weights))
            if has_changed and not has_other_modules:
                has_moved = list(map(_addresses, previous)) != list(map(_addresses, self._states))
                self.count(storage=has_moved, modules=False)
            return has_changed or has_other_modules

    def notice(self, structure: bool = True) -> None:
        """Count changes of adapters' attributes now, as they may be changed back before the next
        :meth:`renew`.

        Args:
            structure: count changes of submodules and hooks, too, which takes about 0.05 ms.
        """
        with self._lock:
            attributes = self._held_by_adapters.read(self._adapters)
            parts = self._parts_and_hooks() if structure else self._structure
            has_other_parts = not are_same(self._structure, parts)
            if has_other_parts:
                self._read_modules()
            if has_other_parts or not are_same(self._adapter_attributes, attributes):
                self._adapter_attributes = attributes
                self.count(structure=has_other_parts)

    def notice_writes(self) -> None:
        """Count replaced parameters, and writes to parameters on a CPU that torch has counted.

        Replaced buffers change ``storage`` only, as a forward may replace buffers.
        """
        with self._lock:
            previous = self._places
            if (places := self._read_places()) != previous:
                self._places = places
                self.storage += previous[1:] != places[1:]
                if previous[:2] != places[:2]:
                    self.weights += 1
                    self._find_places()  # a weight may have other components now

    def count(
        self, modules: bool = True, structure: bool = False, storage: bool | None = None
    ) -> None:
        """Count a change: advance ``weights`` and the counters that the arguments name.

        Args:
            modules: advance ``modules``.
            structure: advance ``structure``.
            storage: advance ``storage``; None: if ``modules`` is advanced.
        """
        with self._lock:
            self.weights += 1
            self.storage += modules if storage is None else storage
            self.modules += modules
            self.structure += structure

    def _may_be_written(self, weights: Sequence[torch.Tensor]) -> bool:
        """Return whether weights may change without a trace, so that their bits must be compared:
        the model is in training mode, or a weight requires grad or is an inference tensor, of which
        torch counts no writes.
        """
        return self._model.training or any(
            weight.requires_grad or weight.is_inference() for weight in weights
        )

    def _read_modules(self) -> None:
        """List the model's modules, hooks and weights."""
        self.all_parts = all_modules(self._model)
        self._classes = list(map(type, self.all_parts))
        self._adapters = [
            module
            for module, kind in zip(self.all_parts, self._classes, strict=True)
            if library_of(kind) not in BUILDERS
        ]
        self._adapter_attributes = self._held_by_adapters.read(self._adapters)
        self._submodules = [part._modules for part in self.all_parts if part._modules]
        self._hooks = [
            hooks
            for part in self.all_parts
            for hooks in (part._forward_pre_hooks, part._forward_hooks)
        ]
        self._structure = self._parts_and_hooks()
        self._find_places()

    def _parts_and_hooks(self) -> list[Any]:
        submodules = itertools.chain.from_iterable(map(dict.values, self._submodules))
        hooks = itertools.chain.from_iterable(map(dict.values, filter(None, self._hooks)))
        return [*submodules, *itertools.filterfalse(is_unchanging, list(hooks))]

    def _find_places(self) -> None:
        """Find the dict and the name of each dense weight, and of each weight with components,
        whose addresses CUDA graphs and copies depend on.
        """
        self._named: list[tuple[list[dict[str, Any]], list[str]]] = []
        # Dicts and names of weights of other classes than torch's, by what reads their components.
        self._quantised = defaultdict[Callable[[Any], Any], tuple[list[Any], list[str]]](
            lambda: ([], [])
        )
        self._has_copies = False
        for kind in ("_parameters", "_buffers"):
            holders: list[dict[str, Any]] = []
            names: list[str] = []
            for holder in filter(None, (vars(part)[kind] for part in self.all_parts)):
                for name, weight in list(holder.items()):
                    if weight is None or weight.is_inference() or weight.is_meta:
                        continue
                    if type(weight) not in PLAIN:
                        places = self._quantised[component_reader(weight)]
                        places[0].append(holder)
                        places[1].append(name)
                    elif _is_dense(weight):
                        holders.append(holder)
                        names.append(name)
                        self._has_copies |= weight.is_cpu
            self._named.append((holders, names))
        self._places = self._read_places()

    def _read_places(self) -> tuple[tuple[int, ...], ...]:
        """Return counts of writes, addresses of parameters and addresses of buffers."""
        try:  # map() and operators in C, as this runs in every step
            weights: list[list[Any]] = [list(map(dict.get, *named)) for named in self._named]
            counts = tuple(map(_count_of_writes, weights[0])) if self._has_copies else ()
            for read, named in self._quantised.items():
                weights[0] += itertools.chain.from_iterable(map(read, map(dict.get, *named)))
            return counts, *(tuple(map(torch.Tensor.data_ptr, each)) for each in weights)
        # A weight was removed, became sparse, or has other components.
        except (KeyError, TypeError, AttributeError, RuntimeError):
            self._find_places()
            return self._places

    def _read_attributes(self) -> list[torch.Tensor]:
        """Store the attributes of all modules and configs, and return the weights."""
        weights = _weights_of(self.all_parts)
        attributes = self._held.read([*self.all_parts, *_configs(self.all_parts)])
        self._attributes = [*self._classes, *attributes, *(weight.dtype for weight in weights)]
        return [
            *weights,
            *(value for value in attributes if type(value) in PLAIN and not _is_stored(value)),
        ]

    def _read_weights(self, weights: Sequence[torch.Tensor], may_be_written: bool) -> bool:
        """Store the states of weights, and return whether they may have changed since the last
        call.

        Args:
            weights: parameters, buffers and other tensors of the model.
            may_be_written: weights may have been written without a trace; compare a checksum of
                their bits.
        """
        previous = self._states, self._digest, self._num_told
        num_writes = _num_writes
        num_told = _num_told
        states = tuple(map(state_of, weights))
        if self.is_behind or may_be_written:
            # If this runs out of memory, self is unchanged, and the next call computes it again.
            self._digest = digest(weights)
        self._states = states
        self._num_writes = num_writes
        self._num_told = num_told
        return previous != (self._states, self._digest, self._num_told)


def can_be_captured(model: torch.nn.Module) -> bool:
    """Return whether a model's forward may be captured in CUDA graphs: it has no hooks, and all
    tensors that hold its weights' values are dense and on one device.
    """
    parts = all_modules(model)
    return _can_be_captured(parts, _weights_of(parts))


def _can_be_captured(parts: Sequence[Any], weights: Sequence[torch.Tensor]) -> bool:
    components = [component_reader(weight)(weight) for weight in weights]
    is_dense = all(each.layout is torch.strided for tensors in components for each in tensors)
    devices = {each.device for tensors in components for each in tensors}
    has_hooks = any(changing_hooks(part) or hasattr(part, "_hf_hook") for part in parts)
    return is_dense and len(devices) == 1 and all(components) and not has_hooks


def why_not_traced(model: torch.nn.Module) -> str | None:
    """Return why a model's forward cannot be compiled; None if it can: it can be captured, and its
    weights are of torch's own classes or :class:`QuantisedWeight`.
    """
    parts = all_modules(model)
    weights = _weights_of(parts)
    if (others := formats_not_traced(weights)) is not None:
        return f"formats of weights that are not compiled: {others}"
    return None if _can_be_captured(parts, weights) else "hooks, or several devices"


def can_be_traced(model: torch.nn.Module) -> bool:
    """Return whether :func:`why_not_traced` has no reason against compiling a model's forward."""
    return why_not_traced(model) is None


def formats_not_traced(weights: Iterable[torch.Tensor]) -> str | None:
    """Return how many weights are in each format that is not compiled, as text; None if all are
    compiled.
    """
    others = Counter(map(_format_of, itertools.filterfalse(_is_dense, weights)))
    return ", ".join(f"{number} of {name}" for name, number in others.items()) or None


def _format_of(weight: Any) -> str:
    if weight.layout is not torch.strided:
        return str(weight.layout).removeprefix("torch.")
    library = type(weight).__module__.partition(".")[0]
    return f"{library}'s {type(weight).__name__}"


def _weights_of(parts: Iterable[Any]) -> list[torch.Tensor]:
    """Return the parameters and buffers of modules."""
    holders = [holder for part in parts for holder in (part._parameters, part._buffers) if holder]
    return [weight for holder in holders for weight in list(holder.values()) if weight is not None]


def _is_dense(weight: Any) -> bool:
    return is_packed(weight) or (type(weight) in PLAIN and weight.layout is torch.strided)


def _addresses(state: State) -> list[int]:
    return [place for place, _ in state]


def _is_stored(tensor: torch.Tensor) -> bool:
    """Return whether a tensor attribute is an activation that a forward has stored, not a
    weight.
    """
    return type(tensor) is torch.Tensor and (tensor.requires_grad or tensor.is_inference())


def _configs(modules: Iterable[Any]) -> list[Any]:
    configs = (vars(module).get("config") for module in modules)
    return list({id(config): config for config in configs if _attributes(config)}.values())


def _attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of a module or config; {} for an object without a ``__dict__``."""
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return attributes if isinstance(attributes, dict) else {}  # a class has a mappingproxy


class _Held:
    """Reads what modules and configs hold; quickly while their attributes are the same objects."""

    def __init__(self) -> None:
        # Ids of all names and values that were read last. None that may count is freed, so that no
        # other object has its id; those under IGNORED are not held, as they may refer to this one.
        self._ids: list[int] = []
        self._pairs: list[tuple[str, Any]] = []
        self._counted: list[Any] = []  # names and values of those that count
        # Containers among these, each with its class and whether it has hooks.
        self._containers: list[tuple[Any, Any, bool]] = []

    def read(self, owners: Iterable[Any]) -> list[Any]:
        """Return names and values of all attributes of the owners that count, and the items of
        containers among them.
        """
        dicts = list(map(_attributes, owners))
        values = itertools.chain.from_iterable(map(dict.values, dicts))
        ids = list(map(id, itertools.chain(itertools.chain.from_iterable(dicts), values)))
        if ids != self._ids:
            pairs = [pair for each in dicts for pair in list(each.items())]
            self._ids = [id(pair[place]) for place in (0, 1) for pair in pairs]
            self._pairs = [pair for pair in pairs if pair[0] not in IGNORED]
            counted = [
                (name, value)
                for name, value in self._pairs
                if name != "forward" or not is_temporary(value)
            ]
            self._counted = list(itertools.chain.from_iterable(counted))
            self._containers = [
                (value, kind, "hooks" in name and kind is dict)
                for name, value in counted
                if type(value) not in SIMPLE and (kind := container_kind(value)) is not None
            ]
        held = list(self._counted)
        for container, kind, has_hooks in self._containers:
            if kind.__len__(container):
                held += (
                    itertools.filterfalse(is_unchanging, items_of(container)[1::2])
                    if has_hooks
                    else _within(container)
                )
        return held


def _within(container: Any) -> list[Any]:
    """Return the keys and values in a container and, recursively, in the containers in it."""
    held = list[Any]()
    containers = [container]
    ids = {id(container)}
    for each in containers:  # grows inside the loop; containers may contain themselves
        values = items_of(each)
        held += values
        for value in values:
            if container_kind(value) is not None and id(value) not in ids:
                ids.add(id(value))
                containers.append(value)
    return held


def are_same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects, compared by identity."""
    return len(before) == len(after) and all(map(operator.is_, before, after))
