"""Rings of the package, and the size of each folder (docs/design.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_slospec
from tests.support.paths import ROOT

PACKAGE = Path(hf_slospec.__file__).parent
BASE = (
    "errors",
    "extras",
    "forks",
    "config",
    "logs",
)  # single files of the core that all of it may import
CORE = (
    *BASE,
    *("__init__", "assembly"),
    *(
        "request",
        "tree",
        "engine",
        "policies",
        "scheduler",
        "model",
        "drafters",
        "generate",
        "batcher",
    ),
)
PLUGINS = ("cpu", "cuda", "families", "heads")
APPLICATIONS = (
    "server",
    "serving",
    "replicas",
    "lab",
    "training",
    "demo",
    "cli",
    "tiny",
    "__main__",
)
KNOWS_PLUGINS = ("assembly", "__init__")  # __init__ has the public names
# Folders whose modules import no torch, so that simulations and the help of commands start fast.
NO_TORCH = (*BASE, "request", "tree", "engine", "policies", "scheduler", "assembly", "lab")
KNOWS_GENERATE = ("generate",)  # may import transformers.generation

# Imports across rings that are still to go: from each file of the core or of a plugin.
PENDING: dict[str, set[str]] = {}

# AST nodes without imports and expression contexts.  A budget rises only with a sentence that says what it buys.
BUDGETS = {
    ".": 1865,  # finding the plugins, what other distributions add; warnings with their logger's name
    "batcher": 10341,  # texts and chats in generate, asyncio, close, policies by name
    "cli": 11295,  # a chat command; the gain in two factors; progress of everything that takes seconds
    "cpu": 15640,  # one compiler at a time; quantised weights stay packed, and are saved dense
    "cuda": 14370,  # forward paths and overrides; graphs of quantised weights, and why a forward is eager
    "demo": 6481,  # a race against stock generate; SLOs chosen by measured steps
    "drafters": 8234,  # past answers and the files of checkpoints; extras are checked before loading
    "engine": 8571,  # lasting acceptance, and the seconds of a request, for plans of whole requests
    # Took over what the core did for states and encoders: their probes, caches and arguments.
    "families": 9097,
    "generate": 19461,  # status of a model, drafters of single calls; whoever learns from rows is told of their ends
    "heads": 16540,
    "lab": 17701,
    # Interfaces (paths, overrides, families, hooks) that keep plugins out of the core; addresses of quantised weights;
    # calls begin sooner, as attributes are compared by id.
    "model": 36791,
    "policies": 5710,
    "replicas": 5828,
    # Took from batcher: options of submit and their checks.
    "request": 4234,  # results print as tables
    "scheduler": 9463,  # admission counts what each request adds to a step; lost requests wait
    "server": 20261,
    "serving": 11,
    "tests": 278449,
    "tiny": 2012,
    "training": 7667,  # a head is retrained while its target is trained
    "tree": 2119,
}


def ring(folder):
    return next(i for i, names in enumerate((CORE, PLUGINS, APPLICATIONS)) if folder in names)


def folder_of(module):
    """Return the folder, or single file, of the package that a module belongs to."""
    return (*module.split("."), "__init__")[1]


def violations(imports):
    """Yield (module, name) of imports that no module may have.

    ``imports``: the names that each module imports, by the module's name, all of them with their
    packages.
    """
    for module, names in imports.items():
        folder = folder_of(module)
        for name in sorted(names):
            root, used = name.split(".")[0], folder_of(name)
            is_internal = root == "hf_slospec"
            if is_internal and folder not in KNOWS_PLUGINS:
                is_other_plugin = ring(folder) == ring(used) == 1 and folder != used
                if ring(used) > ring(folder) or is_other_plugin:
                    yield module, name
            is_heavy = root in ("torch", "transformers")
            if folder in NO_TORCH and (used not in NO_TORCH if is_internal else is_heavy):
                yield module, name
            if name.startswith("transformers.generation") and folder not in KNOWS_GENERATE:
                yield module, name


def imports_of(path):
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            names.add(node.module)
            if node.module == "hf_slospec":  # folders may be imported from the package, too
                folders = {*CORE, *PLUGINS, *APPLICATIONS}
                names |= {f"hf_slospec.{a.name}" for a in node.names if a.name in folders}
    return names


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    kept = parts if len(parts) == 1 else [part for part in parts if part != "__init__"]
    return ".".join(("hf_slospec", *kept))


def size(path):
    ignored = (ast.expr_context, ast.Import, ast.ImportFrom, ast.alias)
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return sum(not isinstance(node, ignored) for node in nodes)


def sizes():
    totals: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        key = parts[0] if len(parts) > 1 else "."
        totals[key] = totals.get(key, 0) + size(path)
    totals["tests"] = sum(size(path) for path in sorted((ROOT / "tests").rglob("*.py")))
    return totals


def test_rings_import_inward_only():
    imports = {module_of(path): imports_of(path) for path in sorted(PACKAGE.rglob("*.py"))}
    excess: dict[str, set[str]] = {}
    for module, name in violations(imports):
        excess.setdefault(module, set()).add(name)
    assert {
        m: names - PENDING.get(m, set())
        for m, names in excess.items()
        if names - PENDING.get(m, set())
    } == {}
    # What is mended leaves the table.
    assert {
        m: names - excess.get(m, set())
        for m, names in PENDING.items()
        if names - excess.get(m, set())
    } == {}


def test_budgets_hold():
    found = sizes()
    assert sorted(found) == sorted(BUDGETS)
    assert {key: found[key] for key, budget in BUDGETS.items() if found[key] > budget} == {}


def test_only_the_assembly_names_the_lab():
    """Its policies are found by an entry point: no import, string or comment of the core names it."""
    core = [path for path in PACKAGE.rglob("*.py") if ring(folder_of(module_of(path))) < 2]
    assert [str(path) for path in core if "hf_slospec.lab" in path.read_text("utf-8")] == []
    assert len(core) > 100


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("hf_slospec.tree.tree", "torch"),
        ("hf_slospec.lab.models", "transformers.models"),
        ("hf_slospec.lab.models", "hf_slospec.model.packed_model"),
        ("hf_slospec.model.packed_model", "hf_slospec.lab"),
        ("hf_slospec.model.packed_model", "hf_slospec.cpu.compiled"),
        ("hf_slospec.cuda.graphs", "hf_slospec.cpu.compiled"),
        ("hf_slospec.heads.mtp", "hf_slospec.server.app"),
        ("hf_slospec.batcher.batcher", "transformers.generation.utils"),
    ],
)
def test_imports_that_no_module_may_have_are_found(module, name):
    assert list(violations({module: {name}})) == [(module, name)]


def test_public_names_exist_and_are_sorted():
    assert hf_slospec.__all__ == sorted(hf_slospec.__all__)
    assert all(hasattr(hf_slospec, name) for name in hf_slospec.__all__)


def test_the_import_loads_no_optional_package():
    """Loading a model imports transformers' quantisers, and with them torchao; the package must not
    add to that. The command line needs what it prints with, and no gradio.
    """
    code = (
        "import sys; from transformers import AutoTokenizer, LlamaForCausalLM; "
        "before = {*sys.modules}; import hf_slospec; "
        "print(*{name.split('.')[0] for name in sys.modules.keys() - before}); "
        "sys.modules['gradio'] = None; import hf_slospec.cli.app"
    )
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    added = set(output.split())
    assert "hf_slospec" in added
    optional = {"flash_attn", "gradio", "matplotlib", "peft", "prometheus_client", "ray", "torchao"}
    assert not added & (optional | {"accelerate", "pandas", "rich", "tqdm", "typer"})
