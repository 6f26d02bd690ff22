"""Check that the package can be installed from PyPI alone, on every supported Python version and
platform.

    python scripts/check_resolution.py

Versions are resolved by uv and nothing is installed. The settings of the machine (indexes, folders
of wheels, constraints, caches) are left out; only certificates and proxies are kept. Base, all
extras and all groups are resolved together: what resolves together resolves alone, too. ``flash``
is left out, as its package is built by a CUDA compiler for the torch that is installed. Needs the
group ``package``.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from uv import find_uv_bin

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = (
    "x86_64-manylinux_2_34",
    "aarch64-manylinux_2_34",
    "aarch64-apple-darwin",
    "x86_64-pc-windows-msvc",
)
KEPT = ("SSL_CERT_FILE", "SSL_CERT_DIR", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy")
# macOS 14 is the oldest that torch has wheels for.
SETTINGS = {"PATH": os.defpath, "MACOSX_DEPLOYMENT_TARGET": "14.0", "UV_PYTHON_DOWNLOADS": "never"}
FROM_SOURCE = (
    "arctic-inference"  # has no wheels; what it needs is read from its source, which is not built
)
NO_EXTRA = "flash"
RUNS_AT_ONCE = 8  # they wait for the network
UV = find_uv_bin()


def parts() -> list[str]:
    """Return the options that name all extras and groups."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = content["project"]["optional-dependencies"].keys() - {NO_EXTRA}
    named = [("--extra", extra) for extra in sorted(extras)] + [
        ("--group", name) for name in content["dependency-groups"]
    ]
    return [*itertools.chain(*named)]


def resolve(python: str, platform: str, options: Sequence[str], home: str) -> str | None:
    """Return why the requirements cannot be resolved there, or None if they can."""
    command = [
        UV, "pip", "compile", "--quiet", "--no-config", "--python-version", python,
        "--python-platform", platform, "--only-binary", ":all:", "--no-binary", FROM_SOURCE, *options, "pyproject.toml",
    ]  # fmt: skip
    environment = SETTINGS | {name: os.environ[name] for name in KEPT if name in os.environ}
    environment |= {"HOME": home, "UV_CACHE_DIR": str(Path(home) / "cache")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return run.stderr.strip() if run.returncode else None


def main() -> int:
    """Resolve for all versions and platforms.  -> the exit code"""
    pinned = ["--constraint", "constraints.txt"]
    runs = {
        f"Python {python}, {platform}{label}": (python, platform, options)
        for python, platform in itertools.product(PYTHONS, PLATFORMS)
        for label, options in (("", parts()), (", constraints.txt", [*parts(), *pinned]))
    }
    lowest = ["--resolution", "lowest-direct"]
    runs |= {
        f"Python {PYTHONS[0]}, oldest versions": (PYTHONS[0], PLATFORMS[0], [*parts(), *lowest])
    }
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(RUNS_AT_ONCE) as pool:
        reasons = dict(
            zip(runs, pool.map(lambda run: resolve(*run, home), runs.values()), strict=True)
        )
    for name, reason in reasons.items():
        print(f"{name}: {'resolves' if reason is None else reason}")
    return int(any(reasons.values()))


if __name__ == "__main__":
    sys.exit(main())
