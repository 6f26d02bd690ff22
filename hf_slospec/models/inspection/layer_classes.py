"""Classes that replace those of layers while packed forwards run."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn


class Prepacked:
    """Base of the class that a layer has while a packed forward runs.

    Nothing else of the layer changes, so that other threads may copy it or run forwards of their own meanwhile.
    """

    plain: ClassVar[type[nn.Module]]  # original class of the layer

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (self.plain,), self.__dict__


def plain_class(layer: nn.Module) -> Any:
    """Return the layer's original class."""
    return layer.plain if isinstance(layer, Prepacked) else type(layer)


def set_class(layer: nn.Module, kind: Any) -> None:
    """Set a layer's class; an assignment would take twenty times as long."""
    object.__setattr__(layer, "__class__", kind)
