"""Extras of the distribution: the packages of each, and the command that installs it; and what other
distributions add.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from hf_slospec.errors import MissingExtraError

NAME = "hf_slospec"
SOURCE = Path(__file__).parents[1]  # the clone, if the package is not installed
SERVE = ("fastapi", "llguidance", "openai", "prometheus_client", "uvicorn")
# Modules that only features of the extra import; pyproject.toml has the versions.
MODULES = {
    "demo": ("gradio",),
    "flash": ("flash_attn",),
    "gguf": ("gguf",),
    "metrics": ("prometheus_client",),
    "plot": ("matplotlib",),
    "ray": (*SERVE, "ray"),
    "serve": SERVE,
    "suffix": ("arctic_inference",),
}


@functools.cache
def load_entry_points(group: str) -> list[Any]:
    """Load what entry points of a group name, in all distributions, and return it."""
    return [entry.load() for entry in importlib.metadata.entry_points(group=group)]


def need(extra: str, what: str) -> None:
    """Raise MissingExtraError unless the packages of an extra are installed; none is imported.

    Args:
        extra: a key of :data:`MODULES`.
        what: the feature that needs the extra, for the message.
    """
    if missing := [module for module in MODULES[extra] if not _is_installed(module)]:
        raise MissingExtraError(
            f"{what} needs {', '.join(missing)}; install with: {install_command(extra)}"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package that it is in
        return False


def install_command(extra: str) -> str:
    """Return the command that adds an extra to the package, which may be a clone, a folder, an
    archive or a release.
    """
    try:
        installed = importlib.metadata.distribution(NAME)
    except (
        importlib.metadata.PackageNotFoundError
    ):  # imported from a clone by PYTHONPATH, or from its folder
        return f'pip install -e "{SOURCE}[{extra}]"'
    record = json.loads(installed.read_text("direct_url.json") or "{}")
    if not record:  # installed from an index
        return f'pip install "{NAME}[{extra}]"'
    url = urlsplit(record["url"])
    if url.scheme != "file":
        source = record["url"]
        if (vcs := record.get("vcs_info")) is not None:
            source = f"{vcs['vcs']}+{source}@{vcs['commit_id']}"
        return f'pip install "{NAME}[{extra}] @ {source}"'
    path = Path(url2pathname(url.path))
    if not path.exists():  # installed from a wheel that was deleted
        return " ".join(
            (
                "pip install",
                *(f'"{requirement}"' for requirement in _requirements(installed, extra)),
            )
        )
    flag = "-e " if record.get("dir_info", {}).get("editable") else ""
    return f'pip install {flag}"{path}[{extra}]"'


def _requirements(installed: Any, extra: str) -> list[str]:
    """Return the requirements of an extra and of the extras that it includes, without markers."""
    parts = [requirement.partition(";") for requirement in installed.requires or ()]
    names = [
        name.strip()
        for name, _, marker in parts
        if marker.replace('"', "'").strip() == f"extra == '{extra}'"
    ]
    included = [name[len(NAME) + 1 : -1] for name in names if name.startswith(f"{NAME}[")]
    return [name for name in names if not name.startswith(NAME)] + [
        name for other in included for name in _requirements(installed, other)
    ]
