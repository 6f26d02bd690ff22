"""Check the wheel in environments of their own: the base install and each extra alone, with nothing
else beside it.

    python scripts/check_installs.py            # builds the wheel; --keep FOLDER keeps the environments
    python scripts/check_installs.py --quick    # the base install and the extra ``serve`` only

In each of them every command answers ``--help``. The commands that an extra is for do a small real
job, and without the extra they say in one line what is missing. The environments of extras see the
packages of the base install, so that torch is installed once. ``flash`` is left out, as it needs a
CUDA compiler. Needs the group ``package``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = ("generate", "serve", "demo", "bench", "profile", "check", "simulate", "train-drafter")
START_S = 900.0  # that a server may take until it answers
HELP = f"""
from hf_slospec.cli.app import app
for arguments in [["--version"], ["--help"], *([name, "--help"] for name in {COMMANDS})]:
    app(arguments, standalone_mode=False)
from hf_slospec.cpu import operators
assert all(source.exists() for source in operators.SOURCES)  # for the compiler, which no job below waits for
"""
COLLECT = """
import hf_slospec
from prometheus_client import CollectorRegistry, generate_latest
model, draft, tokenizer = hf_slospec.load_tiny_pair()
with hf_slospec.SLOSpecGenerator(model, assistant_model=draft, tokenizer=tokenizer) as generator:
    generator.submit("def f(", max_new_tokens=4).result()
    registry = CollectorRegistry()
    registry.register(generator.collector())
    assert b"hf_slospec:" in generate_latest(registry)
"""
GENERATE = 'generate "def f(" --max-new-tokens 4'
BASE_JOBS = (  # one of each other command that needs no extra
    "simulate --system auto --number 4",
    """bench --size tiny --new-tokens 4 --repeats 1 --batch 1 --config '{"compile": false}'""",
    "profile --size tiny --seconds 1 --no-keep --no-compile",
    "check --prompts prompts.txt --max-new-tokens 2 --repeats 0",
)
WITHOUT = {  # commands that miss an extra
    "serve": "serve",
    "ray": "serve --replicas 1",
    "demo": "demo",
    "plot": "simulate --number 4 --plot plot.png",
    "suffix": f"{GENERATE} --drafter suffix",
    "gguf": f"{GENERATE} --target model.gguf",
}

# In one process, as its imports take longer than most of the commands.
BASE_SCRIPT = f"""{HELP}
import shlex
from typer.testing import CliRunner
for line in jobs:
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 0, f"{{line}} says:\\n{{result.output}}"
for extra, line in {WITHOUT}.items():
    result = CliRunner().invoke(app, shlex.split(line))
    said = [line for line in result.output.splitlines() if "install with: pip install" in line]
    is_said = len(said) == 1 and f"[{{extra}}]" in said[0] and isinstance(result.exception, SystemExit)
    assert result.exit_code and is_said, f"without {{extra}}, {{line}} says:\\n{{result.output}}"
"""


class Environment:
    """A virtual environment with the package, or with one of its extras.

    Args:
        base: environment whose packages it sees.
    """

    def __init__(self, folder: Path, requirement: str, base: Environment | None = None):
        self.folder = folder
        venv.create(folder, with_pip=base is None)  # the others see its pip, too
        self.python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        own = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
        self.packages = Path(own)
        if base is not None:
            (self.packages / "base.pth").write_text(f"{base.packages}\n")
        self.settings = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        }
        self.settings |= {
            "HF_HUB_OFFLINE": "1",
            "HF_ASSETS_CACHE": str(folder.parent / "profiles"),
            "COLUMNS": "300",
        }
        # Two are checked at once, beside the tests; a Ray node has 30 s to start unless told
        # otherwise.
        self.settings |= {"OMP_NUM_THREADS": "1", "RAY_raylet_start_wait_time_s": "300"}
        pip = [
            self.python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "--disable-pip-version-check",
        ]
        subprocess.run(
            [*pip, "-c", ROOT / "constraints.txt", requirement], check=True, env=self.settings
        )

    def run(self, *arguments: str | Path) -> str:
        """Run Python and return what it printed; raises AssertionError if it failed."""
        run = subprocess.run(
            [self.python, *arguments], env=self.settings, cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert run.returncode == 0, (
            f"{self.folder.name}: {arguments} ended with {run.returncode}:\n{run.stdout}"
        )
        return run.stdout

    def command(self, line: str) -> str:
        """Run a command of the package as :meth:`run` does."""
        return self.run("-m", "hf_slospec", *shlex.split(line))

    @contextlib.contextmanager
    def serving(self, line: str, path: str) -> Iterator[str]:
        """Run a command that serves until ``path`` answers, yield its address, and end the command."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        address = f"http://127.0.0.1:{port}"
        with tempfile.TemporaryFile("w+") as output:
            server = subprocess.Popen(
                [self.python, "-m", "hf_slospec", *shlex.split(line), "--port", str(port)], env=self.settings,
                cwd=self.folder, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                ends = time.monotonic() + START_S
                while not answers(address + path):
                    assert server.poll() is None and time.monotonic() < ends, (
                        f"{line} does not answer"
                    )
                    time.sleep(0.2)
                yield address
                # An interrupt is ignored by processes that a shell started in the background
                server.terminate()
                server.wait(START_S)
            except BaseException:
                output.seek(0)
                print(f"{self.folder.name}: {line}:\n{output.read()}")
                raise
            finally:
                server.kill()
                server.wait()


def answers(url: str) -> bool:
    """Return whether a server answers."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def complete(address: str) -> None:
    """Ask a server for a few tokens."""
    body = json.dumps({"model": "tiny", "prompt": "def f(", "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"{address}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4


def check_base(base: Environment, jobs: tuple[str, ...]) -> None:
    """Run commands that need no extra, and those that miss one."""
    (base.folder / "prompts.txt").write_text("def f(\nclass A:\n")
    (base.folder / "model.gguf").touch()
    base.command(GENERATE)
    base.run("-c", f"jobs = {jobs}\n{BASE_SCRIPT}")


def check_ray(own: Environment) -> None:
    """Serve with a replica, and ask for a few tokens."""
    with own.serving("serve --size tiny --replicas 1", "/health") as address:
        complete(address)


def check_demo(own: Environment) -> None:
    """Open the page of the demo with models of its own."""
    with own.serving("demo --size tiny --no-compile", "/"):
        pass


def check_serve(own: Environment) -> None:
    """Serve, and ask for a few tokens."""
    with own.serving("serve --size tiny", "/health") as address:
        complete(address)


JOBS: dict[str, Callable[[Environment], object]] = {
    "ray": check_ray,
    "demo": check_demo,
    "serve": check_serve,
    "plot": lambda own: own.command(WITHOUT["plot"]),
    "metrics": lambda own: own.run("-c", COLLECT),
    "suffix": lambda own: own.command(WITHOUT["suffix"]),
    "gguf": lambda own: own.run(
        "-c", "import gguf; assert gguf.GGUFReader"
    ),  # tests/real reads a published file
}
QUICK = ("serve",)  # extras that every change is checked with


def main() -> None:
    """Build the wheel, and check it in one environment after another, two at a time."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--keep", type=Path, help="folder for the environments")
    parser.add_argument(
        "--quick", action="store_true", help=f"few commands, and no extras but {', '.join(QUICK)}"
    )
    options = parser.parse_args()
    folder = options.keep
    extras = QUICK if options.quick else tuple(JOBS)
    with contextlib.nullcontext(folder) if folder else tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        subprocess.run(
            [sys.executable, "-m", "build", "--outdir", root / "dist", ROOT],
            check=True,
            stdout=subprocess.PIPE,
        )
        subprocess.run(
            [sys.executable, "-m", "twine", "check", "--strict", *(root / "dist").iterdir()],
            check=True,
        )
        (wheel,) = (root / "dist").glob("*.whl")
        said = threading.Lock()

        def check(extra: str, base: Environment | None) -> Environment:
            begun = time.monotonic()
            requirement = str(wheel) if base is None else f"hf_slospec[{extra}]"
            own = Environment(root / extra, requirement, base)
            if base is None:
                check_base(own, BASE_JOBS[:1] if options.quick else BASE_JOBS)
            else:
                own.run("-c", HELP)
                JOBS[extra](own)
            with said:
                print(f"{extra}: works ({time.monotonic() - begun:.0f} s)", flush=True)
            return own

        base = check("base", None)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda extra: check(extra, base), extras))


if __name__ == "__main__":
    main()
