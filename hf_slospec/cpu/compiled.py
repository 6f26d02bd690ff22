"""Forward path by torch's ahead-of-time compiler on a CPU.

A package is compiled once per machine and architecture, in a process of its own, while forwards are
eager. Its first forwards are compared with eager ones on the same inputs, and again after any
change of the model's modules.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakMethod

import torch
import torch.nn.functional as F

from hf_slospec.config import SLOSpecConfig
from hf_slospec.cpu import operators
from hf_slospec.cpu.compile_job import NICENESS, POLL_S, CompileJob
from hf_slospec.cpu.joined_linears import JoinedLinears
from hf_slospec.cpu.kernels import granularity
from hf_slospec.cpu.twin import MIN_SIZE, GraphDescription, Interface
from hf_slospec.model.batch import PackedBatch
from hf_slospec.model.eager import EagerPath
from hf_slospec.model.inputs import ForwardInputs, ForwardTensors, Outputs
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.machine import leaving_a_core
from hf_slospec.model.paths import Facts, ForwardPath, PathContext
from hf_slospec.model.properties import autocast_dtype, relative_error, tolerance_in
from hf_slospec.model.version import ModelVersion, can_be_traced

logger = logging.getLogger(__name__)

START_S = 5.0  # seconds of eager forwards after which compiling pays
# Forwards of chains, and those of trees, are compared with eager ones until so many more agreed
# than differed. In half precision, states of some texts are so large that rounding alone makes a
# difference.
NUM_COMPARED = 2
FP32_TOLERANCE = 1e-4  # relative error of logits in fp32


class CompiledPath(ForwardPath):
    """Packages of one model's forwards, by the hidden states that they return.

    Until a package is ready, forwards are eager, and their seconds decide when it is compiled."""

    name = "compiled"
    order = 20

    def __init__(self, context: PathContext, eager: ForwardPath):
        """Load the package of forwards without hidden states, if it was compiled or is to be waited
        for.
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
        # Versions of the model that packages were compared with.
        self._storage = context.version.storage
        self._modules = context.version.modules
        self._is_traced = can_be_traced(self._model)
        if self._is_traced:
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
            return "attention='4d_mask' is the plain reference"
        if any(device.type != "cpu" for device in facts.kv_devices):
            return "only models on a CPU are compiled"
        if facts.has_own_attention or facts.has_latent_attention:
            return "its layers compute attention by themselves, or over latent keys"
        if facts.package not in ("transformers", __name__.partition(".")[0]):
            return f"only classes of transformers are compiled, and this is one of {facts.package}"
        return operators.why_unsupported()

    def status(self, feature_layers: tuple[int, ...] = ()) -> str:
        if not self._is_traced:
            return "eager: hooks, or weights of other classes than torch's"
        package = self._packages.get(feature_layers)
        return "eager: not compiled yet" if package is None else package.status

    @property
    def is_ready(self) -> bool:
        """Return whether a package is loaded and computes forwards."""
        return self._is_traced and any(package.is_ready for package in self._packages.values())

    @property
    def num_one_off_forwards(self) -> int:
        """Number of forwards compared with eager ones since the last change of modules."""
        return sum(package.num_compared for package in self._packages.values())

    def renew(self, version: ModelVersion) -> None:
        self._is_traced = can_be_traced(self._model)
        compares = self._modules != version.modules
        is_described = self._storage == version.storage
        self._modules = version.modules
        self._storage = version.storage
        for layers, package in self._packages.items():
            package.renew(None if is_described else self._described(layers), compares)

    @contextlib.contextmanager
    def measuring(self, pool: KVPool) -> Iterator[None]:
        """Compare no forwards inside this context, as theirs are tokens that no text has."""
        compares = self._compares
        self._compares = False
        try:
            yield
        finally:
            self._compares = compares

    def run(self, inputs: ForwardInputs) -> Outputs | None:
        if not self._is_traced or autocast_dtype("cpu") is not None:
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
        """Compute an eager forward, which leaves a core to the compiler while it runs."""
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
        """Return the packed weights of linear layers, of which those of one list are joined."""
        for linears in self._linears:
            if linears.names == names:
                return linears
        is_invariant = self._config.exact is not None
        linears = JoinedLinears(self._model, names, self._config.prepack, is_invariant)
        self._linears.append(linears)
        return linears

    def _described(self, feature_layers: tuple[int, ...]) -> GraphDescription:
        return GraphDescription.of(self._model, self._layers, feature_layers, self._keeps_logits)


class _Package:
    """One compiled graph of a model: its compilation, its weights, and its forwards."""

    def __init__(
        self,
        model: Any,
        description: GraphDescription,
        joined: Callable[[list[list[str]]], JoinedLinears],
        waits: bool,
    ):
        """Load the package, if it was compiled; with ``waits``, compile it first."""
        self._model = model
        self._identity = description.identity()
        self._joined = WeakMethod(joined)  # its owner holds this package
        self.input_name = description.input_name
        self._dtypes = {
            dtype for dtype, _ in description.tensors.values() if dtype.is_floating_point
        }
        self._why_not: str | None = None  # why it computes no forwards, if that is for good
        self._change: str | None = None  # what in the model differs from what was compiled
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0  # time.monotonic() at the start of the process
        self._looked_s = -POLL_S  # the same at the last look at what other processes compile
        self._is_queued = False  # another compiler runs
        self._thread: threading.Thread | None = None
        self._graph: _Graph | None = None
        self.num_compared = 0
        self._agreed = {
            False: 0,
            True: 0,
        }  # forwards that agreed, less those that differed; by whether they had a tree
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
        """Return whether it computes forwards."""
        return self._graph is not None and self._why_not is None and self._change is None

    @property
    def is_compiling(self) -> bool:
        """Return whether the compiler runs, as far as ``advance`` has seen."""
        return self._process is not None and self._thread is None

    @property
    def status(self) -> str:
        """Which path computes forwards, and why it is not the compiled one."""
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
        """Take in changes of the model, which ``description`` describes if more than values of
        weights have changed.
        """
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
        """Compute a forward, and compare it with that of ``eager``; None if it failed.

        Args:
            inputs: those of the forward.
            tensors: made of them, without plans.
            tokens: the model's input.
            eager: None: nothing is compared.
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
            return expected  # which NaN spreads to which tokens depends on the kernels
        tolerance = FP32_TOLERANCE if is_fp32 else tolerance_in(self._dtypes)
        pairs = zip(outputs, expected, strict=True)
        errors = [
            float(relative_error(ours, plain).max())
            for ours, plain in pairs
            if ours is not None is not plain
        ]
        agrees = all(error <= tolerance for error in errors)  # NaN does not
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


class _Graph:
    """A loaded package with the weights of one model."""

    def __init__(self, model: Any, job: CompileJob, interface: Interface, linears: JoinedLinears):
        """Load the package; the library must be loaded.

        Raises:
            OSError, RuntimeError: it cannot be loaded.
        """
        from torch._inductor import aoti_load_package  # the operators must have been loaded

        parameters = inspect.signature(aoti_load_package).parameters  # torch 2.6 knows no threads
        options: dict[str, Any] = (
            {"run_single_threaded": True} if "run_single_threaded" in parameters else {}
        )
        loader: Any = aoti_load_package(str(job.path), **options).loader
        self._run = getattr(loader, "boxed_run", loader.run)
        job.path.touch()  # packages that are used are kept
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
        """Take in changes of the model's weights and modules."""
        self._find_weights()
        self._linears.renew()

    def __call__(
        self, pool: KVPool, batch: PackedBatch, tensors: ForwardTensors, tokens: torch.Tensor
    ) -> Outputs:
        """Compute a forward; RuntimeError if a weight has another shape, dtype or layout than was
        compiled.
        """
        self._linears.context.follow(pool, batch)
        num_tokens = tokens.shape[1]
        num_logits = len(tensors.logit_rows)
        # Padded, as graphs need two tokens or more, and as oneDNN caches half a megabyte for each
        # number of them.
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
        logits, *features = self._run([*padded, rows, self._linears.context.tensor, *weights])
        return Outputs(logits[:num_logits], features[0][:num_tokens] if features else None)
