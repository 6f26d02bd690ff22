"""Names of the replicas that the routers of this process know to run.

Serve copies the router's module into its own code, so what others need to know of routers is kept in this one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

_names: weakref.WeakKeyDictionary[object, tuple[str, ...]] = weakref.WeakKeyDictionary()  # by router


def set_running(router: object, names: Sequence[str]) -> None:
    """Set which replicas a router knows to run."""
    _names[router] = tuple(names)


def running_replicas() -> list[str]:
    """Return the names of the replicas, in order."""
    return sorted({name for names in list(_names.values()) for name in names})
