"""Extras of the distribution: the packages that each needs, and how it is added to what is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from hf_slospec.errors import MissingExtraError

NAME = "hf_slospec"
SOURCE = Path(__file__).parents[1]  # the clone, where the package is not installed
SERVE = ("fastapi", "llguidance", "openai", "prometheus_client", "uvicorn")
# Modules that are imported only by what the extra is for; pyproject.toml has the versions.
MODULES = {
    "demo": ("gradio", "httpx"),
    "flash": ("flash_attn",),
    "metrics": ("prometheus_client",),
    "plot": ("matplotlib",),
    "ray": (*SERVE, "ray"),
    "serve": SERVE,
    "suffix": ("arctic_inference",),
}


def need(extra: str, what: str) -> None:
    """Raise MissingExtraError unless the packages of an extra are installed; they are looked for, not imported.

    Args:
        extra: a key of :data:`MODULES`.
        what: what needs it, for the message.
    """
    if missing := [module for module in MODULES[extra] if importlib.util.find_spec(module) is None]:
        raise MissingExtraError(f"{what} needs {', '.join(missing)}; install with: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Return the command that adds an extra to the installed package: a clone, a folder, an archive or a release."""
    try:
        own = importlib.metadata.distribution(NAME)
    except importlib.metadata.PackageNotFoundError:  # imported from a clone by PYTHONPATH, or from its folder
        return f'pip install -e "{SOURCE}[{extra}]"'
    record = json.loads(own.read_text("direct_url.json") or "{}")
    if not record:  # from an index
        return f'pip install "{NAME}[{extra}]"'
    url = urlsplit(record["url"])
    if url.scheme != "file":
        source = record["url"]
        if (vcs := record.get("vcs_info")) is not None:
            source = f"{vcs['vcs']}+{source}@{vcs['commit_id']}"
        return f'pip install "{NAME}[{extra}] @ {source}"'
    path = Path(url2pathname(url.path))
    if not path.exists():  # a wheel that was deleted
        return " ".join(("pip install", *(f'"{requirement}"' for requirement in _requirements(own, extra))))
    flag = "-e " if record.get("dir_info", {}).get("editable") else ""
    return f'pip install {flag}"{path}[{extra}]"'


def _requirements(own: Any, extra: str) -> list[str]:
    """Return what an extra adds to the requirements, without markers."""
    parts = [requirement.partition(";") for requirement in own.requires or ()]
    found = [name.strip() for name, _, marker in parts if marker.replace('"', "'").strip() == f"extra == '{extra}'"]
    included = [name[len(NAME) + 1 : -1] for name in found if name.startswith(f"{NAME}[")]
    return [name for name in found if not name.startswith(NAME)] + [
        name for other in included for name in _requirements(own, other)
    ]
