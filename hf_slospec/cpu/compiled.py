"""The ``compiled`` forward path, which runs AOTInductor packages on a CPU.

A background process (``compile_job.py``) compiles one package per machine and graph, while forwards
are eager. The outputs of its first forwards are compared with eager outputs for the same inputs,
and again after a change of the model's modules.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch
import torch.nn.functional as F

from hf_slospec.config import SLOSpecConfig
from hf_slospec.cpu import operators
from hf_slospec.cpu.compile_job import NICENESS, POLL_S, CompileJob, Interface
from hf_slospec.cpu.joined_linears import JoinedLinears
from hf_slospec.cpu.kernels import granularity
from hf_slospec.cpu.pieces import MIN_SIZE
from hf_slospec.cpu.twin import GraphDescription
from hf_slospec.model.batch import PackedBatch
from hf_slospec.model.eager import EagerPath
from hf_slospec.model.inputs import ForwardInputs, ForwardTensors, Outputs
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.machine import leaving_a_core
from hf_slospec.model.paths import Facts, ForwardPath, PathContext
from hf_slospec.model.properties import autocast_dtype, relative_error, tolerance_in
from hf_slospec.model.version import ModelVersion, why_not_traced

logger = logging.getLogger(__name__)

START_S = 5.0  # seconds spent in eager forwards after which a compilation pays off and is started
# Forwards are compared with eager ones until so many more of them agreed than differed, counted
# separately for batches with and without a draft tree. One difference may be rounding: in half
# precision, the hidden states of some texts are very large.
NUM_COMPARED = 2
FP32_TOLERANCE = 1e-4  # relative error that outputs in fp32 may have
# How much larger the error of some tokens may be: at the first tokens of a text, rounding grows to
# half of the logits in bf16.
OUTLIER = 50


class CompiledPath(ForwardPath):
    """Forward path of one model, with a package for each set of hidden states to return.

    Until a package is ready, forwards are eager; after ``START_S`` seconds of these it is compiled.
    """

    name = "compiled"
    order = 20

    def __init__(self, context: PathContext, eager: ForwardPath):
        """Load the package of forwards that return logits only, if it exists; with
        ``compile="wait"``, compile it first if it does not.
        """
        assert isinstance(eager, EagerPath)
        self._eager = eager
        self._model = context.model
        self._layers = tuple(context.layers)
        self._keeps_logits = context.keeps_logits
        self._config = context.config
        self._compares = self._config.exact is None
        self._eager_s = 0.0  # seconds of eager forwards so far
        self._linears: list[JoinedLinears] = []  # shared by packages that join the same layers
        self._packages: dict[tuple[int, ...], _Package] = {}
        # Versions of the model's tensors and modules at the last call of `renew`.
        self._storage = context.version.storage
        self._modules = context.version.modules
        self._untraced = why_not_traced(self._model)
        if self._untraced is None:
            self._package(())

    @classmethod
    def why_not(cls, facts: Facts, config: SLOSpecConfig) -> str | None:
        if not config.compile:
            return "compile=False"
        if facts.dynamic_parts is not None:
            return facts.dynamic_parts
        if facts.varies_rope:
            return "its rotary embeddings depend on the length"
        if config.attention == "4d_mask":
            return "attention='4d_mask' calls the model's own attention"
        if any(device.type != "cpu" for device in facts.kv_devices):
            return "only models on a CPU are compiled"
        if facts.has_own_attention or facts.has_latent_attention:
            return "its layers compute attention by themselves, or over latent keys"
        if facts.package not in ("transformers", __name__.partition(".")[0]):
            return f"only classes of transformers are compiled, and this is one of {facts.package}"
        return operators.why_unsupported()

    def status(self, feature_layers: tuple[int, ...] = ()) -> str:
        if self._untraced is not None:
            return f"eager: {self._untraced}"
        package = self._packages.get(feature_layers)
        return "eager: not compiled yet" if package is None else package.status

    @property
    def is_ready(self) -> bool:
        """Return whether a package is loaded and computes forwards."""
        return self._untraced is None and any(
            package.is_ready for package in self._packages.values()
        )

    @property
    def num_one_off_forwards(self) -> int:
        """Number of forwards compared with eager ones since the last change of modules."""
        return sum(package.num_compared for package in self._packages.values())

    def renew(self, version: ModelVersion) -> None:
        self._untraced = why_not_traced(self._model)
        compares = self._modules != version.modules
        is_described = self._storage == version.storage
        self._modules = version.modules
        self._storage = version.storage
        for layers, package in self._packages.items():
            package.renew(None if is_described else self._described(layers), compares)

    @contextlib.contextmanager
    def measuring(self, pool: KVPool) -> Iterator[None]:
        """Compare no forwards with eager ones inside this context, as their tokens are random."""
        compares = self._compares
        self._compares = False
        try:
            yield
        finally:
            self._compares = compares

    def run(self, inputs: ForwardInputs) -> Outputs | None:
        if self._untraced is not None or autocast_dtype("cpu") is not None:
            return None
        package = self._package(inputs.feature_layers)
        if not package.is_ready:
            return self._run_eagerly(inputs) if self._config.exact is None else None
        tensors = inputs.tensors()
        tokens = tensors.model_inputs().get(package.input_name)
        if tokens is None:
            return None
        eager = self._eager if self._compares else None
        return package.run(inputs, tensors, tokens, eager)

    def _run_eagerly(self, inputs: ForwardInputs) -> Outputs:
        """Compute a forward eagerly, and leave a core to a compilation that is running."""
        is_compiling = any(package.is_compiling for package in self._packages.values())
        begun_s = time.perf_counter()
        with leaving_a_core() if is_compiling else contextlib.nullcontext():
            outputs = self._eager.run(inputs)
        self._eager_s += time.perf_counter() - begun_s
        return outputs

    def _package(self, feature_layers: tuple[int, ...]) -> _Package:
        if feature_layers not in self._packages:
            described = self._described(feature_layers)
            waits = self._config.compile == "wait"
            self._packages[feature_layers] = _Package(self._model, described, self._joined, waits)
        package = self._packages[feature_layers]
        if not package.is_ready:
            package.advance(may_start=self._eager_s >= START_S)
        return package

    @property
    def num_bytes(self) -> int:
        """Bytes of packed weights."""
        return sum(linears.num_bytes for linears in self._linears)

    def _joined(self, names: list[list[str]]) -> JoinedLinears:
        """Return the packed weights of these linear layers, made only once for the same names.

        Layers in one inner list read the same input and are joined into one matrix."""
        for linears in self._linears:
            if linears.names == names:
                return linears
        is_invariant = self._config.exact is not None
        linears = JoinedLinears(self._model, names, self._config.prepack, is_invariant)
        self._linears.append(linears)
        return linears

    def _described(self, feature_layers: tuple[int, ...]) -> GraphDescription:
        is_invariant = self._config.exact is not None
        described = GraphDescription.of(
            self._model, self._layers, feature_layers, self._keeps_logits
        )
        return replace(described, is_invariant=is_invariant)


class _Package:
    """One compiled graph of a model: starts its compilation, loads it, and computes forwards."""

    def __init__(
        self,
        model: Any,
        description: GraphDescription,
        joined: Callable[[list[list[str]]], JoinedLinears],
        waits: bool,
    ):
        """Load the package if it exists; with ``waits``, compile it first if it does not."""
        self._model = model
        self._identity = description.identity()
        self._joined = WeakMethod(joined)  # weak: the method's object holds this package
        self.input_name = description.input_name
        self._dtypes = {
            dtype for dtype, _ in description.tensors.values() if dtype.is_floating_point
        }
        self._why_not: str | None = None  # why this package can never be used any more
        self._change: str | None = None  # why it cannot be used until the model is changed back
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0  # time.monotonic() at the start of the process
        self._looked_s = -POLL_S  # the same at the last look at what other processes compile
        self._is_queued = False  # another compiler runs
        self._thread: threading.Thread | None = None
        self._graph: _Graph | None = None
        self.num_compared = 0
        # Whether a batch has a tree -> comparisons that agreed, less those that differed.
        self._agreed = {False: 0, True: 0}
        try:
            self._job = CompileJob.of(description.with_modules(model), 0 if waits else NICENESS)
            if waits:
                self._job.complete()
            if self._job.interface is not None:
                self._load()
            else:
                self._why_not = self._job.failure
        except OSError as error:
            self._refuse_to_compile(error)

    def _refuse_to_compile(self, error: OSError) -> None:
        self._why_not = f"compiling needs a process, which pickles the config, and the cache directory ({error})"

    @property
    def is_ready(self) -> bool:
        """Return whether the package can compute forwards now."""
        return self._graph is not None and self._why_not is None and self._change is None

    @property
    def is_compiling(self) -> bool:
        """Return whether the compiler was still running at the last call of ``advance``."""
        return self._process is not None and self._thread is None

    @property
    def status(self) -> str:
        """Return "compiled", or "eager: " with the reason why this package is not used."""
        if self.is_ready:
            return "compiled"
        if self._thread is not None:
            busy = "loading"
        elif self._process is not None:
            busy = "compiling"
        else:
            busy = "another compiler runs" if self._is_queued else "not compiled yet"
        return f"eager: {self._why_not or self._change or busy}"

    def advance(self, may_start: bool) -> None:
        """Load the package once it is there, compiled by this process or another one; start the
        compilation if ``may_start`` and no compiler runs.
        """
        if self._why_not is not None or self._thread is not None:
            return
        now_s = time.monotonic()
        if self._process is None:
            if now_s - self._looked_s < POLL_S:
                return
            self._looked_s = now_s
            if self._job.interface is None and self._job.failure is None:
                if may_start:
                    self._start()
                return
        elif self._process.poll() is None:
            return
        else:
            seconds = now_s - self._started_s
            logger.info("compiled forwards of %s in %.0f s", type(self._model).__name__, seconds)
        self._thread = threading.Thread(target=self._load, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        try:
            self._process = self._job.start()
        except OSError as error:
            self._refuse_to_compile(error)
        self._started_s = time.monotonic()
        self._is_queued = self._process is None

    def renew(self, description: GraphDescription | None, compares: bool) -> None:
        """Update the package after a change of the model.

        ``description``: present description of the model; None: only values of weights changed.
        ``compares``: compare the next forwards with eager ones again."""
        if description is not None:
            is_same = description.identity() == self._identity
            self._change = None if is_same else "the model was changed since it was compiled"
        if compares:
            self.num_compared = 0
            self._agreed = dict.fromkeys(self._agreed, 0)
        if self._change is None and self._graph is not None:
            self._graph.renew()

    def _load(self) -> None:
        try:
            if (interface := self._job.interface) is None:
                self._why_not = self._job.failure or "the compilation ended without a package"
            elif (joined := self._joined()) is not None:
                operators.load()
                self._graph = _Graph(self._model, self._job, interface, joined(interface.linears))
        except (OSError, RuntimeError) as error:
            self._why_not = f"the package could not be loaded ({error})"

    def run(
        self,
        inputs: ForwardInputs,
        tensors: ForwardTensors,
        tokens: torch.Tensor,
        eager: EagerPath | None,
    ) -> Outputs | None:
        """Return the outputs of a forward, or the eager outputs if both were compared; None if the
        compiled forward failed, which ends the use of this package.

        Args:
            inputs: the forward's inputs.
            tensors: tensors made from ``inputs``, without attention plans.
            tokens: token ids or embeddings, whichever the graph takes.
            eager: path to compare the outputs with; None: no comparison.
        """
        assert self._graph is not None
        try:
            outputs = self._graph(inputs.pool, inputs.batch, tensors, tokens)
        except RuntimeError as error:
            self._refuse(f"the compiled forward failed with {error!r}")
            return None
        has_tree = not all(span.is_chain for span in inputs.batch.spans)
        if eager is None or not len(outputs.logits) or self._agreed[has_tree] >= NUM_COMPARED:
            return outputs
        expected = eager.run(inputs)
        is_fp32 = self._dtypes == {torch.float32}
        if bool(expected.logits[:, :1].isnan().any()):
            return expected  # how NaN spreads from token to token depends on the kernels
        tolerance = FP32_TOLERANCE if is_fp32 else tolerance_in(self._dtypes)
        pairs = zip(outputs, expected, strict=True)
        errors = [
            _typical_error(relative_error(ours, plain))
            for ours, plain in pairs
            if ours is not None is not plain
        ]
        agrees = all(error <= tolerance for error in errors)  # an error of NaN does not agree
        self.num_compared += 1
        self._agreed[has_tree] += 1 if agrees else -1
        if not agrees and (is_fp32 or self._agreed[has_tree] <= -NUM_COMPARED):
            self._refuse(f"its logits differ from those of an eager forward by {max(errors):.2g}")
        return expected

    def _refuse(self, why: str) -> None:
        logger.warning(
            "%s is no longer computed by compiled forwards: %s", type(self._model).__name__, why
        )
        self._why_not = why
        self._graph = None


def _typical_error(errors: torch.Tensor) -> float:
    """Return the median of tokens' errors, or more if one of them is an outlier beyond rounding."""
    return max(float(errors.quantile(0.5)), float(errors.max()) / OUTLIER)


class _Graph:
    """A loaded package with the weights of one model."""

    def __init__(self, model: Any, job: CompileJob, interface: Interface, linears: JoinedLinears):
        """Load the package; the operators' library must have been loaded before.

        Raises:
            OSError, RuntimeError: the package cannot be loaded.
        """
        self._run = operators.LoadedGraph(interface.script, interface.pieces)
        for file in (job.path, *map(Path, interface.pieces)):
            file.touch()  # files that were not used recently are deleted
        self._model = model
        self._names = interface.weights
        self._linears = linears
        self._find_weights()

    def _find_weights(self) -> None:
        self._holders = []
        for name in self._names:
            path, _, attribute = name.rpartition(".")
            module = self._model.get_submodule(path)
            holder = module._parameters if attribute in module._parameters else module._buffers
            self._holders.append((holder, attribute))
        self._shapes = [(holder[name].shape, holder[name].dtype) for holder, name in self._holders]

    def renew(self) -> None:
        """Find the model's present weights, and replace the packed copies of changed ones."""
        self._find_weights()
        self._linears.renew()

    def __call__(
        self, pool: KVPool, batch: PackedBatch, tensors: ForwardTensors, tokens: torch.Tensor
    ) -> Outputs:
        """Compute a forward.

        Raises:
            RuntimeError: a weight no longer has the shape, dtype or layout that was compiled."""
        self._linears.context.follow(pool, batch)
        num_tokens = tokens.shape[1]
        num_logits = len(tensors.logit_rows)
        # Padded, as graphs take MIN_SIZE tokens or more, and as oneDNN caches half a megabyte for
        # each number of tokens that it is called with.
        missing = max(-num_tokens % granularity(num_tokens), MIN_SIZE - num_tokens)
        padding = (0, missing) if tokens.ndim == 2 else (0, 0, 0, missing)
        padded = F.pad(tokens, padding), F.pad(tensors.position_ids, (0, missing))
        rows = F.pad(tensors.logit_rows, (0, max(MIN_SIZE - num_logits, 0)))
        weights = [holder[name] for holder, name in self._holders]
        for weight, (shape, dtype) in zip(weights, self._shapes, strict=True):
            if weight.shape != shape or weight.dtype != dtype or not weight.is_contiguous():
                raise RuntimeError(
                    f"a weight is now {weight.dtype} {tuple(weight.shape)}, was {dtype} {tuple(shape)}"
                )
        logits, *features = self._run(*padded, rows, self._linears.context.tensor, *weights)
        return Outputs(logits[:num_logits], features[0][:num_tokens] if features else None)
