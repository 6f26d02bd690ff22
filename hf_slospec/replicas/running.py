"""Names of the running replicas, as known to the routers of this process.

Serve copies the router's module, so state that is shared with other modules is kept in this one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

_names: weakref.WeakKeyDictionary[object, tuple[str, ...]] = weakref.WeakKeyDictionary()  # by router


def set_running(router: object, names: Sequence[str]) -> None:
    """Set the names of the running replicas that a router knows."""
    _names[router] = tuple(names)


def running_replicas() -> list[str]:
    """Return the names of the running replicas, sorted."""
    return sorted({name for names in list(_names.values()) for name in names})
