"""Overrides: replacements of linear layers (packed, fused, exact or quantised weights) and of other
libraries' functions while packed forwards run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from threading import get_ident
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_slospec.assembly import load_plugins
from hf_slospec.extras import load_entry_points
from hf_slospec.forks import Lock, reset_in_children

if TYPE_CHECKING:
    from hf_slospec.model.version import ModelVersion

Attribute = tuple[Any, str]  # an object and the name of one of its attributes

_MISSING = object()
# Attribute that marks functions which replace others only while a context lasts.
TEMPORARY = "_hf_slospec_temporary"


class ReplacedAttributes:
    """Attributes that contexts in several threads may replace at the same time; the last context to
    end restores their original values.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # (id of the object, attribute name) -> the object, the attribute's original value, the
        # value in the object's __dict__ (_MISSING: inherited), ids of the contexts' threads.
        self._users: dict[tuple[int, str], tuple[Any, Any, Any, list[int]]] = {}
        reset_in_children(self)

    def replace(
        self, attributes: Sequence[Attribute], replacement: Callable[[Any, Attribute], Any]
    ) -> None:
        """Set each attribute to ``replacement(original value, attribute)``.

        If ``replacement`` raises an error, no attribute is changed.
        """
        with self._lock:
            users = [
                self._users.get((id(owner), name)) or _unused(owner, name)
                for owner, name in attributes
            ]
            values = [
                replacement(user[1], attribute)
                for user, attribute in zip(users, attributes, strict=True)
            ]
            for (owner, name), (_, value, stored, threads), new in zip(
                attributes, users, values, strict=True
            ):
                self._users[id(owner), name] = owner, value, stored, [*threads, get_ident()]
                if isinstance(new, FunctionType):
                    vars(new)[TEMPORARY] = True
                setattr(owner, name, new)

    def restore(self, attributes: Sequence[Attribute]) -> None:
        """End one context's replacement of the attributes; restore those that no other context
        replaces.
        """
        with self._lock:
            for owner, name in attributes:
                threads = self._users[id(owner), name][-1]
                threads.remove(get_ident())
                self._set_back_unless_used((id(owner), name))

    def _set_back_unless_used(self, key: tuple[int, str]) -> None:
        owner, _, stored, threads = self._users[key]
        if not threads:
            if stored is not _MISSING:
                setattr(owner, key[1], stored)
            elif key[1] in vars(owner):
                delattr(owner, key[1])
            del self._users[key]

    def reset_after_fork(self) -> None:
        """End the contexts of threads that do not exist in this forked child, also of a thread that
        had replaced only some of its attributes.
        """
        for key, (*_, threads) in list(self._users.items()):
            threads[:] = [thread for thread in threads if thread == get_ident()]
            self._set_back_unless_used(key)


def is_temporary(value: Any) -> bool:
    """Return whether a function was set by a context of :class:`ReplacedAttributes` that has not
    ended.
    """
    return type(value) is FunctionType and TEMPORARY in vars(value)


def _unused(owner: Any, name: str) -> tuple[Any, Any, Any, list[int]]:
    return owner, getattr(owner, name), vars(owner).get(name, _MISSING), []


# Function called in place of another: (the replaced function, *the arguments of the call).
Override = Callable[..., Any]


class LinearOverride(Protocol):
    """One method of computing linear layers, and functions around them, in packed forwards.

    Implementations are packed copies of weights, fused layers, and products with exact bits. A
    plugin registers a factory by :func:`register_override`; implementations inherit the defaults.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes of this override's copies of weights."""
        return 0

    @property
    def num_rounded(self) -> int:
        """Number of weights that the copies hold with reduced precision."""
        return 0

    @property
    def kernels(self) -> Mapping[str, int]:
        """Kernel name -> number of weights it multiplies with; part of the identity of saved cost
        profiles.
        """
        return {}

    @property
    def functions(self) -> Mapping[Attribute, Override]:
        """Functions of other libraries to replace, such as transformers' rotary embedding."""
        return {}

    def make(self, linear: nn.Module) -> Override | None:
        """Return a function that computes a layer in place of its forward: (original forward,
        layer, *inputs) -> output; None if the layer's forward is not replaced.
        """
        return None

    def renew(self, version: ModelVersion) -> None:
        """Update what was made from the model's weights and modules; ``make`` is then called for
        all layers again.
        """


@dataclass(frozen=True)
class OverrideOptions:
    """Settings that decide which overrides a model gets."""

    device: str = "cpu"  # type of the model's device
    prepack: bool | None = False  # see SLOSpecConfig
    fused_layers: bool = False  # see SLOSpecConfig
    exact: str | None = None  # see SLOSpecConfig
    autocast: torch.dtype | None = None  # dtype, if the model's forward enables autocast


# (model, options) -> its override, or None if it has none for this model
Factory = Callable[[Any, OverrideOptions], LinearOverride | None]
ENTRY_POINTS = "hf_slospec.overrides"  # entry point group; each entry is a factory
_factories: list[Factory] = []


def register_override(factory: Factory) -> None:
    """Register a factory for all models. If overrides of several factories replace the same layer,
    the first one is used.
    """
    if factory not in _factories:
        _factories.append(factory)


# Layer or replaced attribute -> the override in force in this thread.
_in_force: ContextVar[Mapping[Any, Override]] = ContextVar("hf_slospec_overrides", default={})  # noqa: B039  read only
_replaced = ReplacedAttributes()


class Overrides:
    """All overrides of one model, which are active during its packed forwards."""

    def __init__(self, model: nn.Module, kinds: Iterable[LinearOverride], is_needed: bool = True):
        """Make no override yet; ``renew`` does.

        Args:
            model: the model.
            kinds: the override objects; if several replace the same layer, the first is used.
            is_needed: see :meth:`need`.
        """
        self._model = model
        self.kinds = list(kinds)
        self._is_needed = is_needed
        self._version: ModelVersion | None = None
        self.layers: dict[nn.Module, Override] = {}
        self._overrides: dict[Any, Override] = {}  # by layer or by replaced attribute
        self.attributes: list[Attribute] = []

    @classmethod
    def of(cls, model: nn.Module, options: OverrideOptions, is_needed: bool = True) -> Overrides:
        """Return the overrides that plugins and other distributions make for a model."""
        load_plugins()
        for factory in load_entry_points(ENTRY_POINTS):
            register_override(factory)
        kinds = [factory(model, options) for factory in _factories]
        return cls(model, [kind for kind in kinds if kind is not None], is_needed)

    @property
    def num_bytes(self) -> int:
        """Bytes of all overrides' copies of weights."""
        return sum(kind.num_bytes for kind in self.kinds)

    @property
    def num_rounded(self) -> int:
        """Number of weights that the copies hold with reduced precision."""
        return sum(kind.num_rounded for kind in self.kinds)

    @property
    def kernels(self) -> dict[str, int]:
        """Kernel name -> number of weights it multiplies with, over all overrides."""
        return dict(itertools.chain.from_iterable(kind.kernels.items() for kind in self.kinds))

    def need(self, is_needed: bool) -> None:
        """Make the overrides if they are needed, else free them: compiled forwards do not call the
        layers.
        """
        if is_needed is not self._is_needed:
            self._is_needed = is_needed
            if self._version is not None:
                self.renew(self._version)

    def renew(self, version: ModelVersion) -> None:
        """Make the overrides again for the model's present weights and modules."""
        self._version = version
        kinds = self.kinds if self._is_needed else []
        for kind in kinds:
            kind.renew(version)
        made = {
            layer: next(filter(None, (kind.make(layer) for kind in kinds)), None)
            for layer in (all_modules(self._model) if kinds else [])
        }
        self.layers = {layer: override for layer, override in made.items() if override is not None}
        functions = {name: each for kind in kinds for name, each in kind.functions.items()}
        owners = dict.fromkeys(_owner_of_forward(type(layer)) for layer in self.layers)
        self.attributes = [*((owner, "forward") for owner in owners), *functions]
        self._overrides = {**self.layers, **functions}

    def in_force(self) -> AbstractContextManager[None]:
        """Return a context in which the overrides are active, in this thread only."""
        return overriding(self._overrides, self.attributes) if self._overrides else nullcontext()


@contextlib.contextmanager
def overriding(
    overrides: Mapping[Any, Override], attributes: Sequence[Attribute]
) -> Iterator[None]:
    """Context manager in which overrides are active, in this thread only.

    Args:
        overrides: by layer or by replaced attribute.
        attributes: attributes to replace: the forwards of the layers' classes, and the attributes
            in ``overrides``.
    """
    outer = _in_force.get()
    _replaced.replace(attributes, _overridable)
    token = _in_force.set({**outer, **overrides} if outer else overrides)
    try:
        yield
    finally:
        _in_force.reset(token)
        _replaced.restore(attributes)


def _owner_of_forward(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the base class that defines a class's forward, so that a call passes only one
    override.
    """
    return next(base for base in kind.__mro__ if "forward" in vars(base))


@functools.lru_cache(maxsize=256)
def _overridable(original: Override, attribute: Attribute) -> Override:
    """Return the function that an attribute is set to while overrides are active in some thread.

    The result is cached, as compiled code of other threads may depend on its identity.
    """
    is_forward = attribute[1] == "forward" and isinstance(attribute[0], type)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        # torch.compile, in another thread, cannot trace the code below.
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        override = _in_force.get().get(args[0] if is_forward else attribute)
        if override is None:
            return original(*args, **kwargs)
        return override(original, *args, **kwargs)

    return function


# Attributes by which a module of fused experts is recognised.
EXPERTS = (
    "has_gate",
    "has_bias",
    "is_transposed",
    "has_post_expert_norm",
    "_is_expert_parallel",
    "_apply_gate",
)


def weight_names(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights that a linear layer or fused experts multiply by; () for
    other layers.
    """
    if type(layer) in (nn.Linear, Conv1D):
        return ("weight",)
    if all(hasattr(layer, name) for name in EXPERTS) and not layer._is_expert_parallel:
        return ("gate_up_proj" if layer.has_gate else "up_proj", "down_proj")
    return ()


CONTAINERS = (dict, list, tuple)


def all_modules(model: nn.Module) -> list[Any]:
    """Return a model and all its submodules.

    Faster than ``model.modules()``; each step reads the modules several times.
    """
    modules: list[Any] = [model]
    ids = {id(model)}  # modules may have several parents, and contain each other
    for module in modules:
        if parts := module._modules:
            for part in list(parts.values()):  # other threads may add some
                if part is not None and id(part) not in ids:
                    ids.add(id(part))
                    modules.append(part)
    return modules


def container_kind(value: Any) -> type[Any] | None:
    """Return dict, list or tuple if the value is an instance of it or of a subclass; else None."""
    kind = type(value)
    return next((base for base in CONTAINERS if kind is base or issubclass(kind, base)), None)


def items_of(container: Any) -> list[Any]:
    """Return the items of a list or tuple, or the keys and values of a dict in turn. Methods of the
    container's class are not called.
    """
    if container_kind(container) is dict:
        # list() first, as other threads may add items.
        return list(itertools.chain.from_iterable(list(dict.items(container))))
    return list(
        list.__iter__(container) if container_kind(container) is list else tuple.__iter__(container)
    )
