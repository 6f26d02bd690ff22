"""Forward paths: implementations of a packed forward (eager, compiled, CUDA graphs, exact), and the
choice of those that a model uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hf_slospec.assembly import load_plugins
from hf_slospec.config import SLOSpecConfig
from hf_slospec.errors import UnsupportedOptionError
from hf_slospec.extras import load_entry_points
from hf_slospec.forks import cached_property
from hf_slospec.model.batch import AttentionLayer
from hf_slospec.model.family import ModelFamily
from hf_slospec.model.inputs import ForwardInputs, Outputs
from hf_slospec.model.kv_cache import KVPool
from hf_slospec.model.length_rope import LengthRope
from hf_slospec.model.linear_overrides import weight_names
from hf_slospec.model.properties import input_device
from hf_slospec.model.version import ModelVersion, can_be_traced
from hf_slospec.model.whose_code import library_of

ENTRY_POINTS = "hf_slospec.paths"  # entry point group; each entry is a subclass of ForwardPath
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Facts:
    """Properties of a model and its layers, found by the probe, that the choice of forward paths
    depends on.
    """

    class_name: str  # name of the model's class
    package: str = "transformers"  # top-level package that defines the model's class
    device: torch.device = CPU  # device of input tokens
    kv_devices: frozenset[torch.device] = frozenset((CPU,))  # devices of the layers' K and V
    num_ranks: int = 1  # number of processes that run the model
    has_states: bool = False  # some layers keep a recurrent state
    # Some layers compute attention themselves, not through transformers' attention interface.
    has_own_attention: bool = False
    has_latent_attention: bool = False  # some layers have multi-head latent attention
    has_chunked_attention: bool = False
    has_fused_experts: bool = False
    attends_to_encoder: bool = False
    varies_rope: bool = False  # rotary embeddings depend on the length of a sequence
    # dtype, if the model's forward enables autocast and weights have other dtypes
    autocast: torch.dtype | None = None
    # The model has no hooks, is on one device, and its weights are of torch's own classes.
    is_plain: bool = True
    # Why Triton's attention is unavailable; read for exact forwards on CUDA only.
    no_kernel: str | None = None
    # The attention backend reads only tensors whose sizes do not depend on sequence lengths.
    has_static_attention: bool = False

    @classmethod
    def of(cls, model: Any, layers: Sequence[AttentionLayer], **fields: Any) -> Facts:
        """Return the facts of a model with these attention layers; ``fields`` are further
        fields.
        """
        return cls(
            type(model).__name__,
            library_of(type(model)),
            input_device(model),
            frozenset(one.device for layer in layers for one in layer.shape.stored),
            has_own_attention=any(layer.is_own for layer in layers),
            has_latent_attention=any(layer.is_latent for layer in layers),
            has_chunked_attention=any(layer.chunk for layer in layers),
            has_fused_experts=any(len(weight_names(each)) > 1 for each in model.modules()),
            is_plain=can_be_traced(model),
            **fields,
        )

    @property
    def dynamic_parts(self) -> str | None:
        """Return why a forward depends on more than its tensors and plans; None if it does not."""
        if self.has_states:
            return "some layers keep a state"
        if self.attends_to_encoder:
            return "it attends to an encoder's outputs"
        return None if self.autocast is None else "its forward enables autocast"

    @property
    def is_on_cuda(self) -> bool:
        """Return whether input tokens are on a CUDA device."""
        return self.device.type == "cuda"


@dataclass(frozen=True, eq=False)
class PathContext:
    """Model, layers and settings that the forward paths of one model share."""

    model: Any
    version: ModelVersion
    facts: Facts
    config: SLOSpecConfig  # settings as changed by resolve_paths, see Resolution
    family: ModelFamily
    layers: Sequence[AttentionLayer]  # attention layers, in the order of their K/V in pools
    rope: LengthRope

    @cached_property
    def keeps_logits(self) -> bool:
        """Return whether the model's forward takes ``logits_to_keep``."""
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters


class ForwardPath:
    """Base of implementations of packed forwards. A model's paths are tried in ascending
    ``order``.
    """

    name: ClassVar[str]
    order: ClassVar[int] = 0  # paths with smaller numbers are tried first

    def __init__(self, context: PathContext, eager: ForwardPath):
        """Make the path for a model.

        Args:
            context: the model and its settings; :meth:`why_not` has returned None for them.
            eager: the model's eager path, which can compute every forward.
        """

    @classmethod
    def why_not(cls, facts: Facts, config: SLOSpecConfig) -> str | None:
        """Return why the path cannot be used for a model; None if it can.

        Args:
            facts: properties of the model.
            config: settings as changed by :func:`resolve_paths`, see :class:`Resolution`.
        """
        return None

    def run(self, inputs: ForwardInputs) -> Outputs | None:
        """Stage K and V of all tokens and return the outputs; None if the next path has to compute
        them.
        """
        raise NotImplementedError

    def renew(self, version: ModelVersion) -> None:
        """Update what the path made from the model's weights and modules, after they have
        changed.
        """

    @property
    def is_ready(self) -> bool:
        """Return whether the path can compute forwards now; a compiler may still be at work."""
        return True

    @property
    def num_bytes(self) -> int:
        """Bytes of the path's copies of weights."""
        return 0

    @property
    def num_one_off_forwards(self) -> int:
        """Number of forwards so far with one-off costs, such as the capture of a CUDA graph."""
        return 0

    @property
    def num_padding_slots(self) -> int:
        """Number of slots for padding tokens that a pool must have, in addition to the slots of
        sequences.
        """
        return 0

    def status(self, feature_layers: tuple[int, ...] = ()) -> str:
        """Return which path computes forwards that return the hidden states after
        ``feature_layers``: this path's name, or "eager" and the reason.
        """
        return self.name

    def measuring(self, pool: KVPool) -> AbstractContextManager[None]:
        """Return a context in which forwards are timed on tokens that belong to no request."""
        return nullcontext()

    def max_idle_bytes(self, pool: KVPool) -> int:
        """Return the largest size in bytes of a pool that is kept idle for this path; 0: the path
        needs none.
        """
        return 0

    def num_draft_rows(self, num_requests: int) -> int | None:
        """Return the number of rows, padding included, that a draft level of this many requests
        must have; None: it may have any number.
        """
        return None


@dataclass(frozen=True)
class Resolution:
    """Which forward paths a model uses, and with which settings."""

    # Settings in force: prepack, fused_layers, compile and cuda_graphs may differ from the user's
    # settings.
    config: SLOSpecConfig
    # Names of paths, in the order in which they are tried; the last can compute every forward.
    paths: tuple[str, ...]
    why_not: Mapping[str, str]  # name of each path that is not used -> the reason


def resolve_paths(config: SLOSpecConfig, facts: Facts) -> Resolution:
    """Return the forward paths of a model, and the settings that are in force with them.

    Args:
        config: the user's settings.
        facts: properties of the model.

    Raises:
        UnsupportedOptionError: ``exact`` is not available for the model, or ``prepack`` was asked
            for and the model is split over processes.
    """
    changes: dict[str, Any] = {}
    if facts.num_ranks > 1:
        if config.prepack:
            raise UnsupportedOptionError(
                f"prepack={config.prepack!r} cannot be combined with a tensor-parallel model: each "
                "process would choose kernels by its own times, and what different kernels draft "
                "may differ; leave it out"
            )
        # CUDA graphs with collectives, and fused layers with split weights, are untested.
        changes = dict(prepack=False, fused_layers=False, cuda_graphs=False, compile=False)
    if config.exact is not None:
        if (why := next(_reasons_against_exact(facts, config), None)) is not None:
            raise UnsupportedOptionError(
                f'exact="{config.exact}" is not available for {facts.class_name}: {why}; leave it '
                "out (outputs in fp32 are exact without it)"
            )
        is_compiled = bool(config.compile) and config.exact == "self"
        changes = dict(prepack=False, fused_layers=False, cuda_graphs=False)
        changes["compile"] = "wait" if is_compiled else False
    if facts.autocast is not None:
        changes["fused_layers"] = False
    in_force = config.model_copy(update=changes)
    reasons = {path.name: path.why_not(facts, in_force) for path in registered_paths()}
    used = [name for name, why in reasons.items() if why is None]
    last = "eager" if config.exact is None else "exact"
    left_out = {name: why for name, why in reasons.items() if why is not None}
    return Resolution(in_force, (*used, last), left_out)


def _reasons_against_exact(facts: Facts, config: SLOSpecConfig) -> Iterator[str]:
    """Yield the reasons why the bits of a token's logits may depend on the other tokens of the
    batch.
    """
    if facts.num_ranks > 1:
        yield "its weights are split over processes"
    if facts.device.type not in ("cpu", "cuda"):
        yield "it is neither on a CPU nor on CUDA"
    if facts.is_on_cuda and config.exact == "bits":
        yield "stock's bits on CUDA depend on the number of rows ('self' asks for less)"
    if facts.is_on_cuda and not facts.is_plain:
        yield "it has hooks, several devices, or weights of other classes than torch's"
    if facts.dynamic_parts is not None:
        yield facts.dynamic_parts
    if facts.varies_rope:
        yield "its rotary embeddings depend on the length"
    if facts.has_own_attention or facts.has_latent_attention or facts.has_chunked_attention:
        yield "some layers attend in chunks, over latent or over chosen keys"
    if facts.has_fused_experts:
        yield "its experts multiply as many tokens at a time as choose them"
    if config.attention not in ("auto", "triton" if facts.is_on_cuda else "sdpa"):
        yield f"attention={config.attention!r} has kernels of its own"
    if facts.is_on_cuda and facts.no_kernel is not None:
        yield f"Triton's attention is not available ({facts.no_kernel})"


_PATHS: dict[str, type[ForwardPath]] = {}


def register_path(path: type[ForwardPath]) -> None:
    """Register a path for all models; it replaces a registered path of the same name."""
    _PATHS[path.name] = path


def registered_paths() -> list[type[ForwardPath]]:
    """Return the paths of plugins and of other distributions, in ascending ``order``."""
    load_plugins()
    for path in load_entry_points(ENTRY_POINTS):
        register_path(path)
    return sorted(_PATHS.values(), key=lambda path: path.order)


def make_paths(
    resolution: Resolution, context: PathContext, eager: ForwardPath
) -> list[ForwardPath]:
    """Make the paths of a model; the last one is ``eager``."""
    return [*(_PATHS[name](context, eager) for name in resolution.paths[:-1]), eager]
