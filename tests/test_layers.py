"""Imports point downward only (docs/design.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import hf_slospec

PACKAGE = Path(hf_slospec.__file__).parent
# A layer may import itself, what is listed here and, where nothing is forbidden, any third-party package.
MAY_IMPORT = {
    "errors": set(),
    "algo": set(),
    "engine": {"algo", "errors"},
    "policies": {"algo", "engine", "errors"},
    "models": {"algo", "engine", "errors"},
    "speculator": {"algo", "engine", "errors", "models", "policies", "profiles"},
    "profiles": {"algo", "models"},
    "profiling": {"models", "profiles"},
    "targets": {"engine", "errors"},
    "trace": {"engine"},
    "context": {"engine", "errors", "models"},
    "rows": {"context", "engine", "models"},
    "lockstep": {"engine", "rows", "speculator"},
    "checks": {"engine", "errors", "models", "rows"},
    "row_processors": set(),
    "hf": {"checks", "context", "engine", "errors", "lockstep", "models", "policies", "row_processors", "rows"}
    | {"speculator", "targets"},
    "telemetry": {"engine", "models"},
    "serving": {"checks", "engine", "errors", "hf", "models", "policies", "speculator", "targets", "telemetry"},
    "generator": {"engine", "hf", "policies", "serving", "targets", "telemetry"},
    "divergence": {"checks", "errors", "generator", "hf", "models", "row_processors", "rows"},
    "tiny": set(),
    "inflate": set(),
    "sim": {"algo", "engine", "errors", "policies"},
    "recording": {"sim"},
    "bench": {"engine", "generator", "recording", "sim"},
    "quiet": set(),
    "pairs": {"errors", "inflate", "models", "tiny"},
    "demo": {"engine", "errors", "generator", "pairs", "quiet", "speculator"},
    "gpu_check": {"bench", "divergence", "engine", "errors", "generator", "models", "pairs", "tiny"},
    "commands": {
        "bench",
        "demo",
        "engine",
        "errors",
        "generator",
        "gpu_check",
        "inflate",
        "pairs",
        "profiling",
        "quiet",
    }
    | {"sim", "tiny", "trace"},
    "cli": {"commands"},
}
NO_TORCH = {"errors", "algo", "engine", "policies", "sim"}
KNOWS_GENERATE = {"checks", "context", "row_processors", "rows", "targets", "lockstep", "hf"}


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def modules() -> list[tuple[str, Path]]:
    found = [(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path) for path in sorted(PACKAGE.rglob("*.py"))]
    return [(layer, path) for layer, path in found if not layer.startswith("__")]


def test_every_module_belongs_to_a_layer() -> None:
    assert {layer for layer, _ in modules()} == set(MAY_IMPORT)


def test_imports_point_downward() -> None:
    for layer, path in modules():
        for name in imports_of(path):
            if name.startswith("hf_slospec."):
                used = name.split(".")[1]
                assert used == layer or used in MAY_IMPORT[layer], f"{path} imports {name}"


def test_lower_layers_know_neither_torch_nor_generate() -> None:
    for layer, path in modules():
        names = imports_of(path)
        if layer in NO_TORCH:
            assert not {name.split(".")[0] for name in names} & {"torch", "transformers"}, path
        if layer not in KNOWS_GENERATE:
            assert not any(name.startswith("transformers.generation") for name in names), path


def test_public_names_exist_and_are_sorted() -> None:
    assert hf_slospec.__all__ == sorted(hf_slospec.__all__)
    assert all(hasattr(hf_slospec, name) for name in hf_slospec.__all__)
