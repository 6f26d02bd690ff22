"""Compiled forwards of one model on a CPU: when a package is made and loaded, and which forwards it
computes.

A package is compiled once per machine and kind of model, in a process of its own, while eager
forwards serve. Its first forwards are compared with eager ones on the same inputs, and again after
any change of the model's modules."""

from __future__ import annotations

import contextlib
import inspect
import logging
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakMethod

import torch
import torch.nn.functional as F

from hf_slospec.config import Compile
from hf_slospec.cpu import operators
from hf_slospec.cpu.compile_job import NICENESS, Job
from hf_slospec.cpu.joined_linears import JoinedLinears
from hf_slospec.cpu.kernels import granularity
from hf_slospec.cpu.operators import plan_for_operators
from hf_slospec.cpu.twin import MIN_SIZE, Description, Interface
from hf_slospec.model.batch import AttentionLayer, PackedBatch
from hf_slospec.model.inputs import Inputs, Outputs
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.machine import leaving_a_core
from hf_slospec.model.properties import autocast_dtype, relative_error, tolerance_in
from hf_slospec.model.version import ModelVersion, can_be_traced
from hf_slospec.model.whose_code import library_of

logger = logging.getLogger(__name__)

START_S = 5.0  # seconds of eager forwards after which compiling pays
# Forwards of chains, and those of trees, are compared with eager ones until so many more agreed
# than differed. In half precision, states of some texts are so large that rounding alone makes a
# difference.
NUM_COMPARED = 2
FP32_TOLERANCE = 1e-4  # relative error of logits in fp32


class CompiledForwards:
    """Packages of one model's forwards, by the hidden states that they return."""

    def __init__(
        self,
        model: Any,
        layers: Sequence[AttentionLayer],
        keeps_logits: bool,
        wanted: Compile,
        prepack: bool | None,
        version: ModelVersion,
        why_not: str | None,
        is_invariant: bool = False,
    ):
        """Load the package of forwards without hidden states, if it was compiled or is to be waited
        for.

        Args:
            model: the model.
            layers: its attention layers, in the order in which the pool stores them.
            keeps_logits: its forward takes ``logits_to_keep``.
            wanted, prepack: see SLOSpecConfig.
            version: that of the model.
            why_not: why its forwards cannot be compiled, if the caller knows.
            is_invariant: a token's logits must not depend on the other tokens of a batch.
        """
        self._model = model
        self._layers = tuple(layers)
        self._keeps_logits = keeps_logits
        self._wanted = wanted
        self._prepack = prepack
        self._is_invariant = is_invariant
        self.why_not = "compile=False" if not wanted else why_not or _why_not(model, layers)
        self._compares = True
        self._eager_s = 0.0  # seconds of eager forwards so far
        self._linears: list[JoinedLinears] = []  # shared by packages that join the same layers
        self._packages: dict[tuple[int, ...], _Package] = {}
        self._can_be_compiled = self.why_not is None
        self._storage = version.storage
        self._modules = version.modules
        if self._can_be_compiled:
            self.why_not = self._why_not_traced()
        if self.why_not is None:
            self._package(())

    def __getitem__(self, feature_layers: tuple[int, ...]) -> str:
        """Return which path computes forwards with these hidden states, and why it is not the
        compiled one.
        """
        if self.why_not is not None:
            return f"eager: {self.why_not}"
        package = self._packages.get(feature_layers)
        return "eager: not compiled yet" if package is None else package.status

    @property
    def is_used(self) -> bool:
        """Return whether a package is loaded and computes forwards."""
        return self.why_not is None and any(package.is_ready for package in self._packages.values())

    @property
    def num_compared(self) -> int:
        """Number of forwards that were compared with eager ones since the last change of the model."""
        return sum(package.num_compared for package in self._packages.values())

    def renew(self, version: ModelVersion) -> None:
        """Take in changes of the model; compare with eager forwards again if its modules changed."""
        if not self._can_be_compiled:
            return
        self.why_not = self._why_not_traced()
        compares = self._modules != version.modules
        is_described = self._storage == version.storage
        self._modules = version.modules
        self._storage = version.storage
        for layers, package in self._packages.items():
            package.renew(None if is_described else self._described(layers), compares)

    def _why_not_traced(self) -> str | None:
        is_traced = can_be_traced(self._model)
        return None if is_traced else "hooks, or weights of other classes than torch's"

    @contextlib.contextmanager
    def uncompared(self) -> Iterator[None]:
        """Compare no forwards inside this context, as those of measurements have tokens that no
        text has.
        """
        self._compares = False
        try:
            yield
        finally:
            self._compares = True

    def beside_the_compiler(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for eager forwards, which leave a core to the compiler while it runs."""
        is_compiling = any(package.is_compiling for package in self._packages.values())
        return leaving_a_core() if is_compiling else contextlib.nullcontext()

    def count(self, eager_s: float) -> None:
        """Count the seconds of an eager forward."""
        self._eager_s += eager_s

    def run(
        self, pool: KVPool, batch: PackedBatch, inputs: Inputs, eager: Callable[[], Outputs] | None
    ) -> Outputs | None:
        """Return logits and features of a packed batch; None if an eager forward has to compute
        them.

        Args:
            pool: storage of the batch's sequences.
            batch: with boolean masks.
            inputs: without plans.
            eager: computes the same without a package; None: nothing is compared.
        """
        if self.why_not is not None or autocast_dtype("cpu") is not None:
            return None
        package = self._package(inputs.feature_layers)
        if not package.is_ready:
            return None
        tokens = inputs.tokens if inputs.level is None else inputs.level.inputs(inputs.tokens)
        if package.input_name not in tokens:
            return None
        return package.run(
            pool, batch, inputs, tokens[package.input_name], eager if self._compares else None
        )

    def _package(self, feature_layers: tuple[int, ...]) -> _Package:
        if feature_layers not in self._packages:
            described = self._described(feature_layers)
            waits = self._wanted == "wait"
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
        known = next((linears for linears in self._linears if linears.names == names), None)
        if known is None:
            known = JoinedLinears(self._model, names, self._prepack, self._is_invariant)
            self._linears.append(known)
        return known

    def _described(self, feature_layers: tuple[int, ...]) -> Description:
        return Description.of(self._model, self._layers, feature_layers, self._keeps_logits)


def _why_not(model: Any, layers: Sequence[AttentionLayer]) -> str | None:
    """Return why a model's forwards cannot be compiled; None if they may."""
    if any(stored.device.type != "cpu" for layer in layers for stored in layer.shape.stored):
        return "only models on a CPU are compiled"
    if any(layer.is_own or layer.is_latent for layer in layers):
        return "its layers compute attention by themselves, or over latent keys"
    if (package := library_of(type(model))) not in ("transformers", "hf_slospec"):
        return f"only classes of transformers are compiled, and this is one of {package}"
    return operators.why_unsupported()


class _Package:
    """One compiled graph of a model: its compilation, its weights, and its forwards."""

    def __init__(
        self,
        model: Any,
        description: Description,
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
        self._thread: threading.Thread | None = None
        self._graph: _Graph | None = None
        self.num_compared = 0
        self._agreed = {
            False: 0,
            True: 0,
        }  # forwards that agreed, less those that differed; by whether they had a tree
        try:
            self._job = Job.of(description.with_modules(model), 0 if waits else NICENESS)
            if waits and self._job.interface is None and self._job.failure is None:
                self._job.start().wait()
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
        """Return whether the compiler has been started and not found to have ended."""
        return self._process is not None and self._thread is None

    @property
    def status(self) -> str:
        """Which path computes forwards, and why it is not the compiled one."""
        if self.is_ready:
            return "compiled"
        busy = (
            "loading"
            if self._thread is not None
            else "not compiled yet"
            if self._process is None
            else "compiling"
        )
        return f"eager: {self._why_not or self._change or busy}"

    def advance(self, may_start: bool) -> None:
        """Start the compilation if it may be, and load its package in a thread once it has ended."""
        if self._why_not is not None or self._thread is not None:
            return
        if self._process is None:
            if may_start:
                try:
                    self._process = self._job.start()
                except OSError as error:
                    self._refuse_to_compile(error)
        elif self._process.poll() is not None:
            self._thread = threading.Thread(target=self._load, daemon=True)
            self._thread.start()

    def renew(self, description: Description | None, compares: bool) -> None:
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
        pool: KVPool,
        batch: PackedBatch,
        inputs: Inputs,
        tokens: torch.Tensor,
        eager: Callable[[], Outputs] | None,
    ) -> Outputs | None:
        """Compute a forward, and compare it if ``eager`` is given; see
        :meth:`CompiledForwards.run`.
        """
        assert self._graph is not None
        try:
            outputs = self._graph(pool, batch, inputs, tokens)
        except RuntimeError as error:
            self._refuse(f"the compiled forward failed with {error!r}")
            return None
        has_tree = not all(span.is_chain for span in batch.spans)
        if eager is None or not len(outputs.logits) or self._agreed[has_tree] >= NUM_COMPARED:
            return outputs
        expected = eager()
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

    def __init__(self, model: Any, job: Job, interface: Interface, linears: JoinedLinears):
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
        self, pool: KVPool, batch: PackedBatch, inputs: Inputs, tokens: torch.Tensor
    ) -> Outputs:
        """Compute a forward; RuntimeError if a weight has another shape, dtype or layout than was
        compiled.
        """
        self._linears.context.follow(pool, plan_for_operators(batch))
        num_tokens = tokens.shape[1]
        num_logits = len(inputs.logit_rows)
        # Padded, as graphs need two tokens or more, and as oneDNN caches half a megabyte for each
        # number of them.
        missing = max(-num_tokens % granularity(num_tokens), MIN_SIZE - num_tokens)
        padding = (0, missing) if tokens.ndim == 2 else (0, 0, 0, missing)
        padded = F.pad(tokens, padding), F.pad(inputs.position_ids, (0, missing))
        rows = F.pad(inputs.logit_rows, (0, max(MIN_SIZE - num_logits, 0)))
        weights = [holder[name] for holder, name in self._holders]
        for weight, (shape, dtype) in zip(weights, self._shapes, strict=True):
            if weight.shape != shape or weight.dtype != dtype or not weight.is_contiguous():
                raise RuntimeError(
                    f"a weight is now {weight.dtype} {tuple(weight.shape)}, was {dtype} {tuple(shape)}"
                )
        logits, *features = self._run([*padded, rows, self._linears.context.tensor, *weights])
        return Outputs(logits[:num_logits], features[0][:num_tokens] if features else None)
