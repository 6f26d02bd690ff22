"""Imports point downward only (docs/design.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import hf_slospec

PACKAGE = Path(hf_slospec.__file__).parent
# From the bottom: a module imports its own layer and those before it; the layers of one tuple import each other.
# ``__init__`` holds the public names.
LAYERS: tuple[str | tuple[str, ...], ...] = (
    *("errors", "extras", "forks", "algo", "engine", "policies", "config", "assembly"),
    *("models/device", "models/batch", "models/inspection"),
    ("models/attention", "models/kv_cache", "models/recurrent", "models/linear", "models/fused", "models/length_rope"),
    *("models/compiled", "models/packed"),
    ("models/sequences", "models/costs", "models/checked_model"),
    *("models", "drafters", "tiny", "generate", "serving", "__init__", "lab"),
    *("serving/openai", "replicas", "serving/replicas", "demo", "cli", "__main__"),
)
NO_TORCH = {
    "errors",
    "extras",
    "forks",
    "algo",
    "config",
    "engine",
    "policies",
    "assembly",
    "lab",
}  # and no layer that imports it
KNOWS_GENERATE = {"generate"}  # may import transformers.generation
FLOORS = {name: floor for floor, layer in enumerate(LAYERS) for name in ((layer,) if isinstance(layer, str) else layer)}
# Imports that run upward all the same, with the reason.
EXCEPTIONS = {
    ("hf_slospec.models.batch.cached_sequence", "hf_slospec.models.recurrent.states"): "a sequence holds its states",
}


def layer_of(module: str) -> str:
    """Return the layer of a module of the package, ``__init__`` for the package itself."""
    (_, first, second, *_) = (*module.split("."), "__init__", "")
    return f"{first}/{second}" if f"{first}/{second}" in FLOORS else first


def violations(imports: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield the imports that no module may have.

    ``imports``: the names that each module imports, by the module's name, all of them with their packages.
    """
    for module, names in imports.items():
        layer = layer_of(module)
        for name in sorted(names):
            root, used = name.split(".")[0], layer_of(name)
            is_own = root == "hf_slospec"
            if is_own and FLOORS[used] > FLOORS[layer] and (module, name) not in EXCEPTIONS:
                yield f"{module} imports {name}, which is above it"
            if layer in NO_TORCH and (used not in NO_TORCH if is_own else root in ("torch", "transformers")):
                yield f"{module} imports {name}, and has to do without torch"
            if name.startswith("transformers.generation") and layer not in KNOWS_GENERATE:
                yield f"{module} imports {name}, which is for {KNOWS_GENERATE} only"


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            names.add(node.module)
            if node.module == "hf_slospec":  # layers may be imported from the package, too
                names |= {f"hf_slospec.{alias.name}" for alias in node.names if alias.name in FLOORS}
    return names


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("hf_slospec", *(parts if len(parts) == 1 else [part for part in parts if part != "__init__"])))


def test_imports_point_downward() -> None:
    imports = {module_of(path): imports_of(path) for path in sorted(PACKAGE.rglob("*.py"))}
    assert {layer_of(module) for module in imports} <= set(FLOORS)
    assert list(violations(imports)) == []


def test_layers_below_the_lab_do_not_name_it() -> None:
    """Its policies are found by an entry point, so that no import, string or comment of the core depends on it."""
    core = [path for path in PACKAGE.rglob("*.py") if FLOORS[layer_of(module_of(path))] < FLOORS["lab"]]
    assert [str(path) for path in core if "hf_slospec.lab" in path.read_text(encoding="utf-8")] == []
    assert len(core) > 100


@pytest.mark.parametrize("lower", FLOORS)
def test_every_arrow_up_is_found(lower: str) -> None:
    for upper in FLOORS:
        if FLOORS[upper] > FLOORS[lower]:
            module, name = (f"hf_slospec.{layer.replace('/', '.')}.one" for layer in (lower, upper))
            assert f"{module} imports {name}, which is above it" in violations({module: {name}})
            if not {lower, upper} & NO_TORCH:
                assert not list(violations({name: {module}}))


def test_exceptions_are_needed() -> None:
    imports = {module_of(path): imports_of(path) for path in sorted(PACKAGE.rglob("*.py"))}
    assert all(name in imports[module] for module, name in EXCEPTIONS)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("hf_slospec.algo.tree", "torch"),
        ("hf_slospec.lab.oracle", "transformers.models"),
        ("hf_slospec.lab.oracle", "hf_slospec.models.packed.model"),
        ("hf_slospec.lab.oracle", "hf_slospec"),
        ("hf_slospec.models.packed.model", "hf_slospec.lab"),
        ("hf_slospec.models.packed.model", "hf_slospec"),
        ("hf_slospec.serving.batcher", "transformers.generation.utils"),
    ],
)
def test_other_imports_that_no_module_may_have_are_found(module: str, name: str) -> None:
    assert list(violations({module: {name}}))


def test_public_names_exist_and_are_sorted() -> None:
    assert hf_slospec.__all__ == sorted(hf_slospec.__all__)
    assert all(hasattr(hf_slospec, name) for name in hf_slospec.__all__)


def test_the_import_loads_no_optional_package() -> None:
    """Loading a model imports transformers' quantisers, and with them torchao; the package must not add to that.

    The command line needs what it prints with, and no gradio.
    """
    code = (
        "import sys; from transformers import AutoTokenizer, LlamaForCausalLM; before = {*sys.modules}; "
        "import hf_slospec; print(*{name.split('.')[0] for name in sys.modules.keys() - before}); "
        "sys.modules['gradio'] = None; import hf_slospec.cli.app"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    added = set(output.split())
    assert "hf_slospec" in added
    optional = {"flash_attn", "gradio", "matplotlib", "peft", "prometheus_client", "ray", "torchao"}
    assert not added & (optional | {"accelerate", "pandas", "rich", "tqdm", "typer"})
