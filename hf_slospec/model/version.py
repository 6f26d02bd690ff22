"""Detection of changes to a model's weights, however they were written.

torch counts writes to a tensor (``_version``), but neither those of fused optimizers nor those
through ``weight.data``, by which adapters are merged and averages swapped in. So a checksum of all
weights is computed before a call, if they may have been written: one pass over the memory, which
takes as long as one step of decoding."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_slospec.forks import Lock, reset_in_children
from hf_slospec.model.overrides import (
    all_modules,
    container_kind,
    is_temporary,
    items_of,
)
from hf_slospec.model.whose_code import is_unchanging

Digest = tuple[int, ...]
State = tuple[
    tuple[int, int | None], ...
]  # address and count of writes of every tensor that holds a weight

FACTOR = (
    0x2C1B3C6D  # 5 modulo 8: its powers repeat after 2**14 even in the two highest bytes of a word
)
CPU_WORDS, DEVICE_WORDS = (
    2**18,
    2**23,
)  # words per addition: they fit a core's cache; few kernel launches
WIDTH = 1024  # sums per row

_num_writes = _num_told = 0


def weights_changed() -> None:
    """Count every model as changed, and read its weights again before its next step.

    Needed after changes that leave no trace: writes through ``weight.data``, or to weights on a
        disk, of a model none
    of whose parameters requires a gradient, or while submitted requests run; and changes of what
    hooks read from elsewhere, such as the strength of a steering vector. The next call notices all
    others."""
    global _num_told
    _num_told += 1
    _count_write()


def _count_write(*_: object) -> None:
    global _num_writes
    _num_writes += 1


# An optimizer's step counts for every model: weights that are not trained may be copies or averages
# of trained ones.
register_optimizer_step_post_hook(_count_write)


class Weights:
    """State of a model's weights when they were last read."""

    def __init__(self, weights: Sequence[torch.Tensor], may_be_written: bool):
        """Read the weights; the arguments are those of :meth:`renew`."""
        self._state: tuple[State, ...] = ()
        self._digest: Digest | None = None
        self._num_writes = _num_writes
        self._num_told = _num_told
        self.renew(weights, may_be_written)

    @property
    def is_behind(self) -> bool:
        """Return whether an optimizer has stepped since, or :func:`weights_changed` was called."""
        return self._num_writes != _num_writes

    def renew(self, weights: Sequence[torch.Tensor], may_be_written: bool) -> bool:
        """Read the weights again, and return whether they may have changed.

        Args:
            weights: parameters and buffers, always in the same order.
            may_be_written: they may have been written without a trace, so all bits are compared.
        """
        before = self._state, self._digest, self._num_told
        num_writes = _num_writes
        num_told = _num_told
        state = tuple(map(_state_of, weights))
        if self.is_behind or may_be_written:
            self._digest = digest(
                weights
            )  # which may run out of memory, and is then computed again
        self._state = state
        self._num_writes = num_writes
        self._num_told = num_told
        return before != (self._state, self._digest, self._num_told)


def may_be_trained(weights: Iterable[torch.Tensor]) -> bool:
    """Return whether a parameter requires a gradient, or is an inference tensor, to which torch
    counts no writes.
    """
    return any(weight.requires_grad or weight.is_inference() for weight in weights)


@torch.no_grad()
def digest(weights: Iterable[torch.Tensor]) -> Digest:
    """Return a checksum of all bits of the weights, which differs if any bit does, or if two
    weights are swapped.

    Words are added by their index in a piece, each piece times another power of ``FACTOR``, and
    these sums again by row and by column. A single change is always seen, and so are two that would
    cancel out in a plain sum."""
    sums: dict[torch.device, torch.Tensor] = {}
    for weight in weights:
        for words in (words for tensor in _stored(weight) for words in _words(tensor.detach())):
            if words.device not in sums:
                size = CPU_WORDS if words.device.type == "cpu" else DEVICE_WORDS
                sums[words.device] = torch.zeros(size, dtype=torch.int32, device=words.device)
            for piece in words.split(len(sums[words.device])):
                total = sums[words.device][: len(piece)]
                torch.add(piece, total, alpha=FACTOR, out=total)
    checksums = list[int]()
    for total in sums.values():
        rows = total.view(-1, WIDTH)
        for line in (rows.sum(0), rows.sum(1)):  # int64
            factors = torch.arange(1, 2 * len(line), 2, device=total.device)
            checksums.append(int((line * factors).sum()))
    return tuple(checksums)


def _stored(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of a weight: several if it is quantised, none if it is offloaded."""
    if weight.is_meta:
        return
    if weight.is_nested and type(weight) is torch.Tensor:
        for part in weight.unbind():
            yield from _stored(part)
    elif hasattr(weight, "__tensor_flatten__"):
        for name in weight.__tensor_flatten__()[0]:
            if isinstance(part := getattr(weight, name), torch.Tensor):  # not a device mesh
                yield from _stored(part)
    else:
        yield weight


def _words(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bits of a tensor as int32: its whole words, then each remaining byte."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    dense = dense.int_repr() if dense.is_quantized else dense.resolve_conj().resolve_neg()
    flat = dense.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 4:  # a view of a larger tensor, such as FSDP's
        flat = flat.clone()
    num_whole = len(flat) // 4 * 4
    yield flat[:num_whole].view(torch.int32)
    if num_whole < len(flat):
        yield flat[num_whole:].int()


def _state_of(weight: torch.Tensor) -> State:
    tensors = list(_stored(weight))
    if not tensors:
        return ((id(weight), None),)
    return tuple(
        (address(each), None if each.is_inference() else each._version) for each in tensors
    )


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's data; the id of a tensor that is stored in several, such as
    a sparse one.
    """
    return tensor.data_ptr() if torch._C._has_storage(tensor) else id(tensor)


# Attributes whose changes do not count. Models in training mode with dropout or gradient
# checkpointing are refused, and others compute the same in it. Packed forwards replace a config's
# attention implementation. Weights are read separately. Stock `generate` stores the positions of
# its last prompt with images in `rope_deltas`, and has a compiled forward and a manager of
# continuous batching for its next call, `enable` replaces `generate`, and trainers set the
# generation config, `use_cache` and `warnings_issued`; packed forwards read none of them, nor hooks
# of gradients and state dicts.
IGNORED = {
    "training",
    "_attn_implementation_internal",
    "_parameters",
    "_buffers",
    "rope_deltas",
    "generate",
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
# Submodules and hooks are read separately too.
NOT_SETTINGS = IGNORED | {
    "_modules",
    *(name for name in vars(torch.nn.Module()) if "hooks" in name),
}
PLAIN = (
    torch.Tensor,
    torch.nn.Parameter,
)  # quantised weights have classes of their own and may have no address
LIBRARIES = ("torch", "transformers")  # modules from elsewhere are adapters, or written by users
VALUES = frozenset(
    (type(None), bool, int, float, str)
)  # types of attributes that are compared by value
SIMPLE = VALUES.union(PLAIN)  # most attributes are


class Fingerprint:
    """Detector of changes to a model's weights and to the attributes of its modules and configs.

    Attributes are compared by identity, which takes a millisecond where :func:`settings` takes ten.
    An attribute that is replaced by an equal object counts as changed.
    """

    def __init__(self, model: torch.nn.Module):
        """Read the model; all states are 0.

        ``modules_state`` does not count changes of weights, ``structure_state`` those of submodules
        and hooks only."""
        self._model = model
        self.state = 0
        self.modules_state = 0
        self.structure_state = 0
        self._lock = Lock()
        self._renewing = Lock()
        self._adapters: list[torch.nn.Module] = []
        self._adapter_attributes: list[Any] = []
        self._structure: list[Any] = []
        weights = self._read()
        self._weights = Weights(weights, self._may_be_written(weights))
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Count the model as changed: another thread may have taken in half of a change."""
        self.count(structure=True)

    @property
    def is_behind(self) -> bool:
        """Return whether an optimizer has stepped, or ``weights_changed`` was called, since the
        last ``renew``.
        """
        return self._weights.is_behind

    def renew(self, is_idle: bool = True) -> bool:
        """Read the whole model; return whether something has changed, and advance ``state`` if so.

        Args:
            is_idle: no request runs; otherwise, writes to weights that leave no trace are not
                searched for.
        """
        with self._renewing:
            held = self._held
            structure = self._structure
            weights = self._read()
            if has_other_modules := not are_same(
                held, self._held
            ):  # counted first, as reading weights may fail
                self.count(structure=not are_same(structure, self._structure))
            has_changed = self._weights.renew(weights, is_idle and self._may_be_written(weights))
            if has_changed and not has_other_modules:
                self.count(modules=False)
            return has_changed or has_other_modules

    def notice(self, structure: bool = True) -> None:
        """Advance the states if adapters have changed, as they may be changed back later.

        With ``structure``, the same for submodules and hooks, which takes a twentieth of a
        millisecond."""
        with self._lock:
            attributes, parts = (
                _held_by(self._adapters),
                self._read_structure() if structure else self._structure,
            )
            has_other_parts = not are_same(self._structure, parts)
            if has_other_parts or not are_same(self._adapter_attributes, attributes):
                self._structure = parts
                self._adapter_attributes = attributes
                self._advance(True, has_other_parts)

    def _read_structure(self) -> list[Any]:
        hooks = itertools.chain.from_iterable(hooks.values() for hooks in self._hooks if hooks)
        submodules = itertools.chain.from_iterable(parts.values() for parts in self._parts)
        return [*submodules, *(hook for hook in list(hooks) if not is_unchanging(hook))]

    def count(self, modules: bool = True, structure: bool = False) -> None:
        """Advance the states for a change that the caller noticed, of weights only unless
        ``modules``.
        """
        with self._lock:
            self._advance(modules, structure)

    def _advance(self, modules: bool, structure: bool) -> None:
        self.state += 1
        self.modules_state += modules
        self.structure_state += structure

    def _may_be_written(self, weights: Sequence[torch.Tensor]) -> bool:
        """Return whether the model is one whose weights may be written without a trace."""
        return self._model.training or may_be_trained(weights)

    def _read(self) -> list[torch.Tensor]:
        """Read the attributes of all modules and configs, and return the weights."""
        modules = all_modules(self._model)
        dicts = [
            weights
            for module in modules
            for weights in (module._parameters, module._buffers)
            if weights
        ]
        classes = list(map(type, modules))
        adapters = [
            module for module, kind in zip(modules, classes, strict=True) if _is_foreign(kind)
        ]
        with self._lock:
            self._adapters = adapters
            self._adapter_attributes = _held_by(adapters)
            self._parts = [module._modules for module in modules if module._modules]
            self._hooks = [
                hooks
                for module in modules
                for hooks in (module._forward_pre_hooks, module._forward_hooks)
            ]
            self._structure = self._read_structure()
        attributes = [*_held_by(modules), *_held_by(_configs(modules))]
        weights = [weight for weights in dicts for weight in weights.values() if weight is not None]
        self._held = [*classes, *attributes, *(weight.dtype for weight in weights)]
        return [
            *weights,
            *(value for value in attributes if type(value) in PLAIN and not _is_stored(value)),
        ]


def _is_stored(tensor: torch.Tensor) -> bool:
    """Return whether an attribute is an activation that a forward has stored."""
    return type(tensor) is torch.Tensor and (tensor.requires_grad or tensor.is_inference())


def _is_foreign(kind: Any) -> bool:
    return kind.__module__.split(".")[0] not in LIBRARIES


def _configs(modules: Iterable[Any]) -> list[Any]:
    configs = (vars(module).get("config") for module in modules)
    return list({id(config): config for config in configs if _attributes(config)}.values())


def _attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of a module or config; none of an object without a ``__dict__``."""
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return attributes if isinstance(attributes, dict) else {}  # that of a class is none


def _held_by(owners: Iterable[Any]) -> list[Any]:
    """Return names and values of all attributes of modules and configs, with what containers hold,
    without weights.
    """
    held: list[Any] = []
    for owner in owners:
        for name, value in list(_attributes(owner).items()):  # other threads may add some
            if name not in IGNORED and not (name == "forward" and is_temporary(value)):
                held.append(name)
                held.append(value)
                if type(value) in SIMPLE or container_kind(value) is None:
                    continue
                if "hooks" in name and container_kind(value) is dict:
                    held.extend(itertools.filterfalse(is_unchanging, items_of(value)[1::2]))
                else:
                    held += _within(value)
    return held


def _within(container: Any) -> list[Any]:
    """Return the keys and values in a container, and in containers in it."""
    held = list[Any]()
    containers = [container]
    known = {id(container)}
    for each in containers:  # which may hold itself
        values = items_of(each)
        held += values
        for value in values:
            if container_kind(value) is not None and id(value) not in known:
                known.add(id(value))
                containers.append(value)
    return held


def are_same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(before) == len(after) and all(map(operator.is_, before, after))


def named_weights(model: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the module's dict that holds a parameter or buffer, and the name in it, for all of
    them.
    """
    for module in all_modules(model):
        for weights in (module._parameters, module._buffers):
            yield from ((weights, name) for name, tensor in weights.items() if tensor is not None)


def settings(model: torch.nn.Module) -> Hashable:
    """Return the settings of all modules and configs: plain attributes such as an adapter's
    switches.
    """
    modules = all_modules(model)
    return (
        *((type(module), _settings_of(vars(module))) for module in modules),
        *((type(config), _settings_of(_attributes(config))) for config in _configs(modules)),
    )


def _settings_of(attributes: dict[str, Any]) -> Hashable:
    return tuple(
        (name, _fixed(value))
        for name, value in list(attributes.items())
        if name not in NOT_SETTINGS
    )


class _Identity:
    """An object that equals itself only, whatever its class compares."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _fixed(value: Any, holders: tuple[int, ...] = ()) -> Hashable:
    """Return a hashable value, equal for attributes with the same effect on a forward as far as
    their types show it.

    An object of any other class counts as changed if another one replaces it. ``holders`` are the
    ids of the containers that hold the value, which may be one of them.
    """
    kind = type(value)
    if kind in PLAIN and not value.is_nested:
        return address(value), value.shape, value.dtype  # graphs read it at its address
    if container_kind(value) is not None:
        if (own := id(value)) in holders:
            return kind, holders.index(own)
        return kind, tuple(_fixed(part, (*holders, own)) for part in items_of(value))
    return (kind, value) if kind in VALUES else _Identity(value)
