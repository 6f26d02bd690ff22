"""Compilation of a model's forward graph, in a separate process, into AOTInductor packages.

One compiler of a user runs at a time on a machine, and ends with the process that started it. It
runs this module and reads a pickled :class:`CompileJob` from its standard input. ``twin.py`` traces
the graph and ``pieces.py`` cuts it; ``compiled.py`` starts the process and later loads the result.
"""

from __future__ import annotations

import contextlib
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from hf_slospec.cpu import joined_linears, operators, pieces, twin
from hf_slospec.cpu.pieces import MAX_INTERPRETED, Graph, Piece
from hf_slospec.cpu.twin import GraphDescription, export_graph
from hf_slospec.model.machine import kept_file, write_atomically

try:
    import fcntl
except ImportError:  # Windows, where nothing is compiled
    fcntl = None  # type: ignore[assignment]  # the module or nothing

logger = logging.getLogger(__name__)

# Niceness of a background compilation, which then gets a fourth of a core that a model keeps busy.
NICENESS = 5
MAX_FILES = 64  # graphs, and packages of a few megabytes each, kept on disk
RETRY_S = 86_400.0  # seconds after which a failed compilation is tried again
LOCK = "compiler.lock"  # file that a compiler locks while it runs
POLL_S = 1.0  # seconds between two looks at the lock, the package, and the parent process
# Processor seconds (benchmarks/compiling.py): to trace one layer, to start and to compile all pieces
# of a graph of many layers, and to build the operators' library.
TRACE_S = 0.2
OTHER_S = 17.0
BUILD_S = 45.0


@dataclass(frozen=True)
class Interface:
    """A compiled graph, and the names of the model's weights and layers that it refers to."""

    weights: list[str]  # parameters and buffers, in the order of the graph's inputs
    linears: list[list[str]]  # layers that each `context_linear` operator computes, by its index
    script: str  # the graph in TorchScript
    pieces: list[str]  # files of the compiled pieces, whose ids are the graph's last input


@dataclass(frozen=True)
class CompileJob:
    """A forward graph to compile, and the path of its :class:`Interface` as JSON."""

    description: GraphDescription
    path: Path
    num_threads: int
    niceness: int

    @classmethod
    def of(cls, description: GraphDescription, niceness: int) -> CompileJob:
        """Return the job that compiles a graph for this machine.

        The path depends on the graph, the CPU, the versions of torch and
        transformers, the number of threads and the sources that are compiled.

        Raises:
            OSError: the cache directory cannot be written.
        """
        modules = (operators, twin, joined_linears, pieces)
        num_threads = torch.get_num_threads()
        key = {
            **description.identity(),
            **operators.instructions(),
            "transformers": transformers.__version__,
            "sources": [
                *(Path(module.__file__ or "").read_text() for module in modules),
                *description.sources,
            ],
            "threads": num_threads,
        }
        path = kept_file("compiled", description.model_class.__name__, key)
        return cls(description, path, num_threads, niceness)

    @property
    def interface(self) -> Interface | None:
        """Interface of the compiled graph; None unless all its files and the operators' library exist."""
        try:
            interface = Interface(**json.loads(self.path.read_text(encoding="utf-8")))
            files = operators.library_path(), *map(Path, interface.pieces)
            return interface if all(file.exists() for file in files) else None
        except (OSError, ValueError, TypeError):
            return None

    @property
    def failure(self) -> str | None:
        """Error of a compilation that failed in the last ``RETRY_S`` seconds; None without one."""
        try:
            if time.time() - self._failure_path.stat().st_mtime < RETRY_S:
                return self._failure_path.read_text(encoding="utf-8")
        except OSError:
            pass
        return None

    @property
    def _failure_path(self) -> Path:
        return self.path.with_suffix(".failed")

    @property
    def estimated_s(self) -> float:
        """Seconds that the compilation takes on two idle cores."""
        compile_s = OTHER_S + TRACE_S * len(self.description.layers)  # on one core
        build_s = 0.0 if operators.library_path().exists() else BUILD_S
        return max(compile_s, (compile_s + build_s) / 2)

    def start(self) -> subprocess.Popen[bytes] | None:
        """Start the compilation, which ends with the package, with a failure, or with this process.

        Returns:
            None if another compiler of this user runs on this machine.

        Raises:
            OSError: the process cannot be started, or the model's config cannot be pickled.
        """
        try:
            pickled = pickle.dumps(self)
        except Exception as error:  # values of the config may be objects of any class
            raise OSError(f"{type(error).__name__}: {error}") from error
        environment = os.environ | {
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with open(self.path.parent.parent / LOCK, "w") as lock:
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
        is_queued = False
        while self.interface is None and self.failure is None:
            begun_s = time.monotonic()
            if (process := self.start()) is not None:
                process.wait()
                seconds = time.monotonic() - begun_s
                name = self.description.model_class.__name__
                logger.info("compiled forwards of %s in %.0f s", name, seconds)
                return
            if not is_queued:
                logger.info("waiting for a compiler of another process")
            is_queued = True
            time.sleep(POLL_S)

    def run(self) -> None:
        """Write the package, or the error if the graph cannot be compiled.

        Raises:
            MemoryError, OSError: not recorded as errors of the graph, so that it is tried again.
        """
        os.nice(self.niceness)
        # Autogroups of Linux share the CPU by session: niceness counts only within one, unless the
        # session's autogroup gets it, too.
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
        with ThreadPoolExecutor(1) as pool, warnings.catch_warnings(action="ignore"):
            library = pool.submit(operators.build)
            program, weights, linears = export_graph(self.description)
            graph = Graph(program, 0.0 if self.description.is_invariant else MAX_INTERPRETED)
            files = [self._compiled(piece) for piece in graph.kinds.values()]
            library.result()
        interface = Interface(weights, linears, graph.script, list(map(str, files)))
        write_atomically(self.path, json.dumps(asdict(interface)))

    def _compiled(self, piece: Piece) -> Path:
        """Return the package of a piece, which other models may have had compiled."""
        key = {**operators.instructions(), "threads": self.num_threads, "piece": piece.key}
        path = kept_file("compiled", "pieces", key).with_suffix(".pt2")
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
                package = Path(folder) / "package.pt2"
                piece.compile(package)
                package.replace(path)
        path.touch()
        return path

    def _remove_old(self) -> None:
        """Remove the least recently used files beyond ``MAX_FILES`` of a kind."""
        for suffix in (".json", ".failed", ".pt2"):
            files = sorted(
                self.path.parent.parent.glob(f"*/*{suffix}"),
                key=lambda path: path.stat().st_mtime,
                reverse=True,
            )
            for file in files[MAX_FILES:]:
                file.unlink(missing_ok=True)


@contextlib.contextmanager
def no_compiler() -> Iterator[None]:
    """Wait until no compiler of this user runs on this machine, and let none start inside the
    context, for measurements. Models that wait for their compilation must have it before.

    Raises:
        OSError: the cache directory cannot be written.
    """
    with open(kept_file("compiled", "", "").parent / LOCK, "w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


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
