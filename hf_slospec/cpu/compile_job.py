"""Compilation of a model's graph, in a process of its own, into a package that later processes
load.

One compiler runs at a time per user and machine, and ends with the process that started it. Run as
a module, this file reads a :class:`CompileJob` from its standard input.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from hf_slospec.cpu import joined_linears, operators, twin
from hf_slospec.cpu.twin import GraphDescription, Interface, export_graph
from hf_slospec.model.machine import kept_file, write_atomically

logger = logging.getLogger(__name__)

NICENESS = 5  # a compilation beside a running model then gets a fourth of a busy core
MAX_PACKAGES = 64  # kept packages; each has some megabytes
RETRY_S = 86_400.0  # seconds after which a failed compilation is tried again
POLL_S = 1.0  # seconds between two looks at the lock, the package, and the parent process
# Seconds to compile one layer on two idle cores, and all that is not layers; measured on graphs of
# 30 layers (benchmarks/compiling.py).
LAYER_S = 2.0
OTHER_S = 8.0


@dataclass(frozen=True)
class CompileJob:
    """A graph to compile, and the file for its package."""

    description: GraphDescription
    path: Path
    num_threads: int
    niceness: int

    @classmethod
    def of(cls, description: GraphDescription, niceness: int) -> CompileJob:
        """Return the job for a model on this machine.

        Raises:
            OSError: the cache directory cannot be written.
        """
        modules = (operators, twin, joined_linears)
        num_threads = torch.get_num_threads()
        key = {
            **description.identity(),
            **operators.instructions(),
            "transformers": transformers.__version__,
            "sources": [
                *(Path(module.__file__ or "").read_text() for module in modules),
                *description.sources,
                operators.SOURCE.read_text().partition("TORCH_LIBRARY")[2],  # their arguments
            ],
            "threads": num_threads,
        }
        path = kept_file("compiled", description.model_class.__name__, key).with_suffix(".pt2")
        return cls(description, path, num_threads, niceness)

    @property
    def interface(self) -> Interface | None:
        """Interface of the finished package; None before it is finished."""
        try:
            interface = Interface(**json.loads(self._interface_path.read_text(encoding="utf-8")))
            is_complete = self.path.exists() and operators.library_path().exists()
            return interface if is_complete else None
        except (OSError, ValueError, TypeError):
            return None

    @property
    def failure(self) -> str | None:
        """Why the compilation failed lately; None if it did not."""
        try:
            if time.time() - self._failure_path.stat().st_mtime < RETRY_S:
                return self._failure_path.read_text(encoding="utf-8")
        except OSError:
            pass
        return None

    @property
    def _interface_path(self) -> Path:
        return self.path.with_suffix(".json")

    @property
    def _failure_path(self) -> Path:
        return self.path.with_suffix(".failed")

    @property
    def estimated_s(self) -> float:
        """Seconds that the compilation takes on two idle cores."""
        return OTHER_S + LAYER_S * len(self.description.layers)

    def start(self) -> subprocess.Popen[bytes] | None:
        """Start the compilation, which ends with the package, with a failure, or with this process.

        Returns:
            None if another compiler of this user runs on this machine.

        Raises:
            OSError: no process could be started, or the model's config cannot be pickled.
        """
        try:
            pickled = pickle.dumps(self)
        except Exception as error:  # values of the config may be objects of any class
            raise OSError(f"{type(error).__name__}: {error}") from error
        environment = os.environ | {
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with open(self.path.parent.parent / "compiler.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            # The new process inherits the lock and holds it until it ends.
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid())],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=environment, start_new_session=True, pass_fds=[lock.fileno()],
            )  # fmt: skip
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(pickled)
        logger.info(
            "compiling forwards of %s in process %d, about %.0f s on idle cores",
            self.description.model_class.__name__, process.pid, self.estimated_s,
        )  # fmt: skip
        return process

    def complete(self) -> None:
        """Compile unless that was done, after the compiler that runs now, and wait for the end.

        Raises:
            OSError: see ``start``.
        """
        while self.interface is None and self.failure is None:
            if (process := self.start()) is not None:
                process.wait()
                return
            time.sleep(POLL_S)

    def run(self) -> None:
        """Make the package, and keep it or why that failed."""
        os.nice(self.niceness)
        # Linux may weigh sessions against each other, and this one's niceness within it only.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(self.niceness), encoding="ascii")
        if self.interface is not None:  # finished between the last look and the start
            return
        try:
            self._compile()
        except (MemoryError, OSError):
            raise
        except Exception as error:  # noqa: BLE001  tracing and compiling run the model's code and much of torch
            write_atomically(self._failure_path, f"{type(error).__name__}: {str(error)[:500]}")
        self._remove_old()

    def _compile(self) -> None:
        torch.set_num_threads(self.num_threads)
        operators.build()
        operators.load()
        with (
            warnings.catch_warnings(action="ignore"),
            tempfile.TemporaryDirectory(dir=self.path.parent) as folder,
        ):
            program, interface = export_graph(self.description)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            package = Path(folder) / "package.pt2"
            torch._inductor.aoti_compile_and_package(program, package_path=str(package))
            package.replace(self.path)
        write_atomically(self._interface_path, json.dumps(asdict(interface)))

    def _remove_old(self) -> None:
        """Remove the packages that were not used for the longest time."""
        packages = sorted(
            self.path.parent.parent.glob("*/*.pt2"),
            key=lambda path: path.stat().st_mtime,
            reverse=True,
        )
        for path in packages[MAX_PACKAGES:]:
            for file in _files_of(path):
                file.unlink(missing_ok=True)


def _files_of(package: Path) -> Iterator[Path]:
    yield from (package.with_suffix(suffix) for suffix in (".json", ".failed", ".pt2"))


def end_with_parent(parent: int) -> None:
    """End this process and the compilers that it runs once the process ``parent`` has ended."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.killpg(0, signal.SIGTERM)
    time.sleep(10 * POLL_S)  # until temporary files are removed
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Read a job and run it; temporary files are removed if that is interrupted."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=end_with_parent, args=(int(sys.argv[1]),), daemon=True).start()
    pickle.load(sys.stdin.buffer).run()


if __name__ == "__main__":
    main()
