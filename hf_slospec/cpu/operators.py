"""Python interface of operators.cpp, the C++ operators that compiled forwards call.

The library is built by this machine's C++ compiler when it is first needed.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from hf_slospec.cpu.quantised import PackedMatrix
from hf_slospec.forks import Lock
from hf_slospec.model.batch import PackedBatch, Span
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.machine import cpu_info, kept_file
from hf_slospec.model.noise import use_operators

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / name for name in ("packed.cpp", "operators.cpp", "noise.cpp")]
INCLUDED = [FOLDER / name for name in ("packed.hpp", "vectors.hpp")]
# Without -ffast-math, which would make the process flush denormal numbers to zero.
FLAGS = [
    *("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-DAT_PARALLEL_OPENMP=1", "-Wno-psabi"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
]
COMPILE_S = 600  # seconds after which the compiler is stopped

_loading = Lock()


def instructions() -> dict[str, str]:
    """Return what compiled code depends on besides its source, as parts of a cache key."""
    flags = cpu_info("flags") or cpu_info("Features")
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu": flags,
        "capability": capability,
    }


def library_path() -> Path:
    """Return the path of the library for this machine, whether it was built or not.

    Raises:
        OSError: the cache directory cannot be written.
    """
    key = {"sources": [file.read_text() for file in SOURCES + INCLUDED], **instructions()}
    return kept_file("compiled", "operators", key).with_suffix(".so")


def build() -> None:
    """Make the library for this machine with its C++ compiler, unless the file exists.

    Raises:
        RuntimeError: there is no C++ compiler, or it failed.
        OSError: the cache directory cannot be written.
    """
    path = library_path()
    if path.exists():
        return
    import fcntl  # Linux only, as are the kernels

    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process builds, others wait
        if not path.exists():
            _build(path)


def _build(path: Path) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler  # imported here: it takes a second

    root = Path(torch.__file__).parent
    openmp = next(
        (f"-l:{path.name}" for path in sorted((root / "lib").glob("libgomp*.so*"))), "-lgomp"
    )
    target = ["-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"]
    if torch.backends.cpu.get_cpu_capability() == "AVX2":  # all that ATEN_CPU_CAPABILITY may allow
        target.append("-mno-avx512f")
    include = root / "include"
    lib = root / "lib"
    compile = [
        *(get_cpp_compiler(), *FLAGS, *target, "-c"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{include}", f"-I{include}/torch/csrc/api/include"),
    ]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor() as pool:
        objects = [Path(folder, f"{source.stem}.o") for source in SOURCES]
        commands = [
            [*compile, source, "-o", made] for source, made in zip(SOURCES, objects, strict=True)
        ]
        list(pool.map(_run, commands))
        partial = Path(folder, path.name)
        libraries = [f"-L{lib}", openmp, "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"]
        _run([compile[0], "-shared", *objects, "-o", partial, *libraries])
        partial.replace(path)


# Shell script that runs a command. Once that or the parent process has ended, it kills what is left
# of its process group: the compiler proper, which g++ starts.
GUARD = """
(while kill -0 $$ && kill -0 $PPID; do sleep 1; done; kill -KILL 0) >/dev/null 2>&1 &
exec "$@"
"""


def _run(command: list[Any]) -> None:
    done = subprocess.run(
        ["sh", "-c", GUARD, "sh", *map(str, command)], capture_output=True, text=True,
        timeout=COMPILE_S, check=False, start_new_session=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-2000:]}")


def _traced_linear(x: torch.Tensor, id: torch.Tensor, index: int, outputs: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


def _traced_attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _traced_embedding(
    indices: torch.Tensor, id: torch.Tensor, index: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    return id.new_empty(*indices.shape, width, dtype=dtype)


# Operators of graphs, with what they return while they are traced. Defined here, as graphs are
# traced and compiled while the library is built.
TRACED: dict[str, Callable[..., torch.Tensor]] = {
    "context_linear(Tensor x, Tensor id, int index, int outputs) -> Tensor": _traced_linear,
    "attend(Tensor query, Tensor key, Tensor value, Tensor id, int index, bool stages, "
    "float scaling, int window, int chunk, float softcap, Tensor? sinks) -> Tensor": _traced_attend,
    "embedding(Tensor indices, Tensor id, int index, int width, ScalarType dtype) -> Tensor": (
        _traced_embedding
    ),
}
_definitions = torch.library.Library("hf_slospec", "FRAGMENT")
_definitions.define(
    "run_piece(Tensor id, Tensor pieces, int[] numbers, Tensor[] inputs) -> Tensor[]"
)
for _schema, _traced in TRACED.items():
    _definitions.define(_schema)
    torch.library.register_fake(f"hf_slospec::{_schema.partition('(')[0]}", _traced)
# Declarations of functions that compiled pieces call directly, by operator
SHIMS = {
    torch.ops.hf_slospec.context_linear.default: [
        "AOTITorchError aoti_torch_cpu_context_linear(AtenTensorHandle x, AtenTensorHandle id, "
        "int64_t index, int64_t outputs, AtenTensorHandle* out)"
    ]
}


def load() -> None:
    """Load the library, which must have been built.

    Raises:
        OSError: the library is missing, or cannot be loaded.
    """
    with _loading:
        ctypes.CDLL(str(library_path()), mode=ctypes.RTLD_GLOBAL)  # pieces call its functions
        use_operators(torch.ops.hf_slospec)


def why_unsupported() -> str | None:
    """Return why compiled forwards are not supported on this system; None if they are."""
    if sys.platform != "linux":
        return f"compiled forwards need Linux, and this is {sys.platform}"
    if not hasattr(torch._inductor, "aoti_load_package"):
        return f"torch {torch.__version__} cannot load packages of its compiler"
    return None


class Context:
    """Weights, K/V pool and batch that the operators in one model's compiled forwards read."""

    def __init__(self, is_invariant: bool = False) -> None:
        """Make an empty context; the library must be loaded.

        With ``is_invariant``, the bits of a token's attention depend on the tokens before it only,
        not on the rest of the batch."""
        self._id: int = torch.ops.hf_slospec.new_context(is_invariant)
        self.tensor = torch.tensor([self._id], device="cpu")
        self._pool: weakref.ref[KVPool] | None = None
        weakref.finalize(self, torch.ops.hf_slospec.delete_context, self._id)

    def set_linear(self, index: int, weights: Sequence[PackedMatrix | torch.Tensor]) -> None:
        """Set the weights, [outputs, inputs] each, of a linear layer, or of several with the same
        input, whose outputs are concatenated.

        ``index``: index of the ``context_linear`` operator in the graph.
        """
        ids = [weight.id if isinstance(weight, PackedMatrix) else 0 for weight in weights]
        plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
        torch.ops.hf_slospec.set_linear(self._id, index, ids, plain)

    def follow(self, pool: KVPool, batch: PackedBatch) -> None:
        """Set the K/V pool and the batch that the next forward reads."""
        operators = torch.ops.hf_slospec
        if self._pool is None or self._pool() is not pool:
            operators.set_pool(self._id, pool.keys, pool.values)
            self._pool = weakref.ref(pool)
        operators.set_plan(self._id, *plan_for_operators(batch))


class LoadedGraph:
    """A graph in TorchScript, with its compiled pieces."""

    def __init__(self, script: str, pieces: Sequence[str]):
        """Load the pieces; the library must be loaded.

        Args:
            script: its text; see ``pieces.Graph``.
            pieces: paths of the packages.

        Raises:
            RuntimeError: the text or a package cannot be loaded.
        """
        self._function = torch.jit.CompilationUnit(script).forward
        ids = list(map(torch.ops.hf_slospec.load_piece, pieces))
        self._pieces = torch.tensor(ids, device="cpu")
        for id in ids:
            weakref.finalize(self, torch.ops.hf_slospec.delete_piece, id)

    @torch.no_grad()
    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Return the graph's outputs."""
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            outputs: list[torch.Tensor] = self._function(*inputs, self._pieces)
        return outputs


def plan_for_operators(batch: PackedBatch) -> tuple[torch.Tensor, ...]:
    """Return the arguments of ``set_plan`` for a batch with boolean masks on the host.

    Returns:
        sequences: [num_sequences, 6] int32: first slot, committed tokens, staged tokens, first
            token in the batch, tokens in the batch, and 1 if it is a chain (see Span), else 0.
        mask: [num_tokens, max_staged] bool, True = may attend; not read for chains.
        windowed_mask: the mask in layers with a sliding window, of the same shape.
        positions: [num_tokens] int32, of the tokens in the batch.
        staged_positions: [num_sequences, max_staged] int32, of all staged tokens.
    """
    spans = batch.spans
    sequences = [
        (
            span.visible.start,
            span.sequence.length,
            span.num_staged,
            span.begin,
            span.num_tokens,
            span.is_chain,
        )
        for span in spans
    ]
    mask = _stacked_masks([None if span.is_chain else span.staged_mask for span in spans], spans)
    windowed_mask = mask
    if any(span.windowed_mask is not None for span in spans):
        windowed_mask = _stacked_masks([span.staged_mask_for(0) for span in spans], spans)
    staged_positions = torch.zeros(
        len(spans), max(span.num_staged for span in spans), dtype=torch.int32, device="cpu"
    )
    for row, span in zip(staged_positions, spans, strict=True):
        row[: span.num_staged] = span.staged_positions
    positions = torch.cat([span.staged_positions[-span.num_tokens :] for span in spans]).int()
    return (
        torch.tensor(sequences, dtype=torch.int32, device="cpu"),
        mask,
        windowed_mask,
        positions,
        staged_positions,
    )


def _stacked_masks(masks: list[torch.Tensor | None], spans: list[Span]) -> torch.Tensor:
    """Return one mask with the rows of all spans, padded with False; None is a mask of False.  ->
    [num_tokens, max_staged] bool
    """
    width = max((mask.shape[1] for mask in masks if mask is not None), default=1)
    stacked = torch.zeros(spans[-1].end, width, dtype=torch.bool, device="cpu")
    for span, mask in zip(spans, masks, strict=True):
        if mask is not None:
            stacked[span.begin : span.end, : mask.shape[1]] = mask
    return stacked
