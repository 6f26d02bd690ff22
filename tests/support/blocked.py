"""Run tests as if folders of the package had been deleted.

The environment variable ``BLOCKED`` names them, comma-separated. Imports of these folders fail, and
test files that name them are not collected."""

from __future__ import annotations

import os
import re
import sys

BLOCKED = [name for name in os.environ.get("BLOCKED", "").split(",") if name]
for _name in BLOCKED:
    sys.modules[f"hf_slospec.{_name}"] = None
MENTION = re.compile(rf"hf_slospec(\.| import )({'|'.join(BLOCKED)})\b")


def pytest_ignore_collect(collection_path):
    if BLOCKED and collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        return bool(MENTION.search(collection_path.read_text(encoding="utf-8"))) or None
    return None
