"""How much memory is free, a container's limit counted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_slospec.model.memory import free_memory

STAT = "anon 5\ninactive_file 300\n"
OLD_STAT = "inactive_file 1\ntotal_inactive_file 100\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "2000\n", "memory.current": "1500\n", "memory.stat": STAT}, 800),
        ({"memory.max": "2000\n", "memory.current": "2500\n", "memory.stat": STAT}, 0),
        ({"memory.max": "max\n", "memory.current": "1500\n", "memory.stat": STAT}, 1000),
        ({"memory.max": "9000\n", "memory.current": "1500\n", "memory.stat": STAT}, 1000),
        ({"memory.max": "2000\n"}, 1000),
        (
            {
                "memory/memory.limit_in_bytes": "2000\n",
                "memory/memory.usage_in_bytes": "1500\n",
                "memory/memory.stat": OLD_STAT,
            },
            600,
        ),
        ({}, 1000),
    ],
)
def test_a_containers_limit_counts(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == expected
