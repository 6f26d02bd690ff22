"""Locks of the package are those of ``hf_slospec.forks``, which a forked child finds free."""

from __future__ import annotations

import ast
from pathlib import Path

import hf_slospec

PACKAGE = Path(hf_slospec.__file__).parent
HOLDING = (
    "Lock",
    "RLock",
    "Condition",
    "Event",
    "Semaphore",
    "BoundedSemaphore",
    "Barrier",
    "cached_property",
)
BODIES = "pydantic's models take no other cached_property, and no child serves"
EVENT = "an event that a thread of one command waits for"
EXCEPTIONS = {
    "cli/activity.py": EVENT,
    "forks.py": "makes them",
    "engine/fair_lock.py": "is reset in a child",
    "replicas/start.py": "a signal handler sets the event, and no child waits for it",
    "server/anthropic.py": BODIES,
    "server/chats.py": BODIES,
    "server/responses.py": BODIES,
}


def made_in(path):
    """Return the locks of the standard library that a module names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in ("threading", "functools", "queue", "multiprocessing")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in (
            "threading",
            "functools",
            "queue",
            "multiprocessing",
        ):
            names += [alias.name for alias in node.names]
    return [name for name in names if name in HOLDING or name.endswith("Queue")]


def test_no_module_makes_a_lock_that_a_forked_child_may_inherit_held():
    made = {str(path.relative_to(PACKAGE)): made_in(path) for path in sorted(PACKAGE.rglob("*.py"))}
    assert {path for path, names in made.items() if names} == set(EXCEPTIONS), made
