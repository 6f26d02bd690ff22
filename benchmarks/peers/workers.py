"""Worker processes, as ``measure.py`` sees them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.protocol import ANSWERS_FD, Settings

HERE = Path(__file__).parent
PYTHONS = {
    "openvino": "ov/bin/python",
    "vllm": "vllm/bin/python",
}  # the other workers run in this environment
ISAS: dict[str, dict[str, str]] = {  # environment of all workers
    "native": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}

UNRESTRICTED = {
    "openvino": "left out: its matrix kernels use AVX-512 whatever the environment variables say"
}


class WorkerError(Exception):
    """A worker ended, or did not answer in time, and was stopped."""


class Worker:
    """A process that loads models once and answers one request at a time (``protocol.py``).

    Args:
        key: the engine and the arguments of its worker.
        start_s: seconds it may take to load.

    Raises:
        WorkerError: it did not start; its log says why.
    """

    def __init__(self, key: tuple[str, ...], settings: Settings, start_s: float):
        engine, *arguments = key
        folder = settings.folder
        python = folder / PYTHONS[engine] if engine in PYTHONS else sys.executable
        command = [python, HERE / f"worker_{engine}.py", settings.written(), *arguments]
        self._log = folder / "logs" / f"{'-'.join(key)}.log"
        begun_s = time.monotonic()
        self._log.parent.mkdir(exist_ok=True)
        answers_fd, worker_fd = os.pipe()
        self._answers = os.fdopen(answers_fd)
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                pass_fds=(worker_fd,),
                env=environment(engine, settings) | {ANSWERS_FD: str(worker_fd)},
                start_new_session=True,  # so that it is stopped together with its own children
            )
        os.close(worker_fd)
        self.facts: dict[str, Any] = self._answer(start_s)
        self.facts |= {"load_s": round(time.monotonic() - begun_s, 1)}

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer: "seconds" and "tokens", or "error"."""
        if self._process.stdin is None or self._process.poll() is not None:
            raise WorkerError(f"its process has ended, see {self._log.name}")
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer(timeout_s)

    def rss_gb(self) -> float:
        """Return the resident memory of the process and its children, mapped files included."""
        process = psutil.Process(self._process.pid)
        return round(
            sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])
            / 1e9,
            2,
        )

    def is_running(self) -> bool:
        """Return whether the process has not ended."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Kill the process and its children."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        ready, _, _ = select.select([self._answers], [], [], timeout_s)
        line = self._answers.readline() if ready else ""
        if not line:
            self.stop()
            fault = "its process ended" if ready else f"no answer within {timeout_s:.0f} s"
            raise WorkerError(f"{fault}, see {self._log.name}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def environment(engine: str, settings: Settings) -> dict[str, str]:
    """Return the environment of an engine's process; vLLM gets the preloaded libraries that its documentation
    recommends.
    """
    paths = [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = os.environ | ISAS[settings.isa] | {"OMP_NUM_THREADS": str(settings.threads)}
    if engine == "transformers":
        return found | {"PYTHONPATH": os.pathsep.join(paths)}  # hf_slospec of this checkout
    found.pop("PYTHONPATH", None)
    if engine == "vllm":
        folder = settings.folder
        libraries = [
            *(folder / "deb").rglob("libtcmalloc_minimal.so.4"),
            folder / "vllm" / "lib" / "libiomp5.so",
        ]
        found |= {
            "LD_PRELOAD": ":".join(map(str, libraries)),
            "VLLM_CACHE_ROOT": f"{folder}/vllm-cache",  # compiled kernels, for the next start
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
    return found
