"""Packed copies of a model's weights on a CPU, for faster kernels.

``torch.nn.functional.linear`` reads weights in their plain layout, which for the few tokens of a
step takes up to six times as long (docs/cpus.md). Only packed forwards use the copies; other
forwards of the model are unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import get_ident
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from hf_slospec.cpu.kernels import choose
from hf_slospec.cpu.packed_weights import (
    Copy,
    PackedWeight,
    active,
    is_plain,
    matrices_of,
    prepacked_class,
    weight_names,
)
from hf_slospec.forks import Lock, reset_in_children
from hf_slospec.model.memory import free_memory
from hf_slospec.model.overrides import plain_class, set_class
from hf_slospec.model.whose_code import is_compiled

logger = logging.getLogger(__name__)

FREE_SHARE = 0.25  # share of the free memory that copies may take with prepack=None

_Key = tuple[int, str, torch.dtype | None]  # id of a layer, name of its weight, dtype of autocast
# Packed weights, shared by all users of a layer; each refers to its layer, so that the layer's id
# stays valid.
_shared: WeakValueDictionary[_Key, PackedWeight] = WeakValueDictionary()


class _PackedClasses:
    """Classes that layers have while packed forwards run in some thread; the last of a model to end
    restores them.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        # By id of a model: threads of its running packed forwards, and the plain class of each of
        # its packed layers.
        self._users: dict[int, tuple[list[int], dict[nn.Module, Any]]] = {}
        reset_in_children(self)

    def set(self, model: nn.Module, classes: dict[nn.Module, Any]) -> None:
        """Begin a packed forward of a model in this thread."""
        with self._lock:
            threads, classes = self._users.setdefault(id(model), ([], classes))
            threads.append(get_ident())
            if len(threads) == 1:
                for layer, plain in classes.items():
                    packed_class = prepacked_class(plain)
                    if type(layer) is plain:  # the user may have parametrised it meanwhile
                        set_class(layer, packed_class)

    def restore(self, model: nn.Module) -> None:
        """End it."""
        with self._lock:
            self._users[id(model)][0].remove(get_ident())
            self._restore_unless_used(id(model))

    def _restore_unless_used(self, key: int) -> None:
        threads, classes = self._users[key]
        if not threads:
            for layer, plain in classes.items():
                if type(layer) is prepacked_class(plain):
                    set_class(layer, plain)
            del self._users[key]

    def reset_after_fork(self) -> None:
        """End the packed forwards of threads that do not exist here."""
        for key, (threads, _) in list(self._users.items()):
            threads[:] = [thread for thread in threads if thread == get_ident()]
            self._restore_unless_used(key)


_packed_classes = _PackedClasses()


class PrepackedLayers:
    """Packed weights of one model's layers."""

    def __init__(
        self,
        model: nn.Module,
        wanted: bool | None,
        autocast: torch.dtype | None = None,
        is_needed: bool = True,
    ):
        """Make the copies.

        Args:
            model: the model.
            wanted: see SLOSpecConfig.prepack.
            autocast: see :class:`PackedWeight`.
            is_needed: see :meth:`need`.
        """
        self._model, self._wanted, self._autocast, self._is_needed = (
            model,
            wanted,
            autocast,
            is_needed,
        )
        self._copies: dict[Copy, PackedWeight] = {}
        new_bytes = self._choose()
        if new_bytes and wanted is None and new_bytes > FREE_SHARE * free_memory():
            logger.info(
                "weights of %s are not prepacked: the copies would take %.1f GiB, more than a quarter of the free "
                "memory; SLOSpecConfig(prepack=True) makes them anyway",
                type(model).__name__,
                new_bytes / 2**30,
            )
            self._wanted = False
        self.renew()
        if self.num_rounded:
            message = (
                "%d weights of %s are too small for fp16; their copies differ by less than 3e-8"
            )
            logger.info(message, self.num_rounded, type(model).__name__)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.num_bytes for copy in self._copies.values())

    @property
    def num_rounded(self) -> int:
        """Weights that the copies hold only approximately."""
        return sum(copy.num_rounded for copy in self._copies.values())

    @property
    def kernels(self) -> dict[str, int]:
        """Number of weights by the kernel that multiplies with them."""
        return dict(
            Counter(str(copy.choice.kernel) for copy in self._copies.values() if copy.matrices)
        )

    def __len__(self) -> int:
        return len(self._copies)

    def need(self, is_needed: bool) -> None:
        """Make the copies, or free them while compiled forwards use others."""
        if is_needed is not self._is_needed:
            self._is_needed = is_needed
            self.renew()

    def renew(self) -> None:
        """Update the copies after any change of the model's layers or weights."""
        self._copies = {
            (layer, name): copy
            for layer, copies in self._all_copies()
            for name, copy in copies.items()
            if copy.matrices
        }
        self._classes = {layer: plain_class(layer) for layer, _ in self._copies}

    def _all_copies(self) -> Iterator[tuple[nn.Module, Mapping[str, PackedWeight]]]:
        """Yield every layer with its packed weights; make missing ones."""
        kernels = {layer: _kernels_of(layer, self._autocast) for layer in self._candidates()}
        copies_of = functools.partial(_copies_of, self._autocast)
        if not any(_packs_slowly(self._autocast, *item) for item in kernels.items()):
            yield from ((layer, copies_of(layer, names)) for layer, names in kernels.items())
            return
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            yield from zip(kernels, pool.map(copies_of, kernels, kernels.values()), strict=True)

    def _candidates(self) -> list[nn.Module]:
        """Return the layers on a CPU without hooks, quantised weights or a replaced forward."""
        if self._wanted is False or not self._is_needed or is_compiled(self._model):
            return []
        return [layer for layer in self._model.modules() if is_plain(layer)]

    def _choose(self) -> int:
        """Choose a kernel for every shape of weight; return the bytes of copies that are still to
        be made.
        """
        by_shape = defaultdict[tuple[torch.dtype, torch.Size], list[torch.Tensor]](list)
        num_bytes = defaultdict[tuple[torch.dtype, torch.Size], int](int)
        for layer in self._candidates():
            for name in weight_names(layer):
                matrices = matrices_of(layer, getattr(layer, name), self._autocast)
                for matrix in matrices:
                    by_shape[matrix.dtype, matrix.shape].append(matrix)
                if (id(layer), name, self._autocast) not in _shared:
                    num_bytes[matrices[0].dtype, matrices[0].shape] += sum(
                        matrix.nbytes for matrix in matrices
                    )
        return sum(
            num_bytes[shape]
            for shape, weights in by_shape.items()
            if choose(weights).kernel is not None
        )

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute with the copies inside this context, in this thread only."""
        if not (copies := self._copies):
            yield
            return
        _packed_classes.set(self._model, self._classes)
        token = active.set(copies)
        try:
            yield
        finally:
            active.reset(token)
            _packed_classes.restore(self._model)


def _kernels_of(layer: nn.Module, autocast: torch.dtype | None) -> Mapping[str, str]:
    """Return the kernel's name for each of a layer's weights that is worth packing, by the weight's
    name.
    """
    weights = {
        name: matrices_of(layer, getattr(layer, name), autocast) for name in weight_names(layer)
    }
    chosen = {name: choose(matrices).kernel for name, matrices in weights.items()}
    return {name: kernel for name, kernel in chosen.items() if kernel is not None}


def _packs_slowly(
    autocast: torch.dtype | None, layer: nn.Module, kernels: Mapping[str, str]
) -> bool:
    """Return whether FBGEMM has yet to pack a layer; it packs 50 million weights per second, in one
    thread.
    """
    return any(
        kernel == "FBGEMM" and (id(layer), name, autocast) not in _shared
        for name, kernel in kernels.items()
    )


def _copies_of(
    autocast: torch.dtype | None, layer: nn.Module, kernels: Mapping[str, str]
) -> Mapping[str, PackedWeight]:
    """Return the up-to-date packed weights of a layer by name; make missing ones."""
    copies = dict[str, PackedWeight]()
    for name in kernels:
        key = id(layer), name, autocast
        if (copy := _shared.get(key)) is not None:
            copy.renew()
        copies[name] = copy or _shared.setdefault(key, PackedWeight(layer, name, autocast))
    return copies
