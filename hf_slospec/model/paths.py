"""Forward paths: ways to compute a packed forward, and which of them a model uses."""

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
from hf_slospec.model.overrides import weight_names
from hf_slospec.model.properties import input_device
from hf_slospec.model.version import ModelVersion, can_be_traced
from hf_slospec.model.whose_code import library_of

ENTRY_POINTS = "hf_slospec.paths"  # group; each entry is a subclass of ForwardPath
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Facts:
    """Findings of the probe that forward paths depend on."""

    class_name: str  # of the model
    package: str = "transformers"  # that defines the model's class
    device: torch.device = CPU  # of input tokens
    kv_devices: frozenset[torch.device] = frozenset((CPU,))  # of the layers' K and V
    num_ranks: int = 1  # processes that run the model
    has_states: bool = False  # some layers keep a state
    has_own_attention: bool = False  # some layers attend in their own code
    has_latent_attention: bool = False
    has_chunked_attention: bool = False
    has_fused_experts: bool = False
    attends_to_encoder: bool = False
    varies_rope: bool = False  # rotary embeddings depend on the length of a sequence
    autocast: torch.dtype | None = None  # enabled by the model's own forward
    is_plain: bool = True  # no hooks, one device, weights of torch's classes
    no_kernel: str | None = None  # why Triton's attention is unavailable; read if exact
    # Attention reads tensors only, whose sizes do not depend on the lengths of sequences.
    has_static_attention: bool = False

    @classmethod
    def of(cls, model: Any, layers: Sequence[AttentionLayer], **fields: Any) -> Facts:
        """Return the facts of a model with these layers; ``others`` are further fields."""
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
        """Return what of a forward is neither in its tensors nor in the plans; None: nothing."""
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
    config: SLOSpecConfig  # the settings in force, see Resolution
    family: ModelFamily
    layers: Sequence[AttentionLayer]  # in the order in which pools store them
    rope: LengthRope

    @cached_property
    def keeps_logits(self) -> bool:
        """Return whether the model's forward takes ``logits_to_keep``."""
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters


class ForwardPath:
    """A way to compute packed forwards of a model. Paths are tried in their order."""

    name: ClassVar[str]
    order: ClassVar[int] = 0  # paths of smaller numbers are tried first

    def __init__(self, context: PathContext, eager: ForwardPath):
        """Make the path of a model for which :meth:`why_not` returns None.

        ``eager`` computes all forwards of the model."""

    @classmethod
    def why_not(cls, facts: Facts, config: SLOSpecConfig) -> str | None:
        """Return why the path is not used for such a model; None if it is.

        ``config``: the settings in force, see :class:`Resolution`."""
        return None

    def run(self, inputs: ForwardInputs) -> Outputs | None:
        """Stage K and V of all tokens and return the outputs; None: the next path computes them."""
        raise NotImplementedError

    def renew(self, version: ModelVersion) -> None:
        """Take in changes of the model's weights and modules."""

    @property
    def is_ready(self) -> bool:
        """Return whether it computes forwards now."""
        return True

    @property
    def num_bytes(self) -> int:
        """Bytes of copies of weights."""
        return 0

    @property
    def num_one_off_forwards(self) -> int:
        """Number of forwards that took longer than later ones of their size will."""
        return 0

    @property
    def num_padding_slots(self) -> int:
        """Slots for padding that a pool has behind those of sequences."""
        return 0

    def status(self, feature_layers: tuple[int, ...] = ()) -> str:
        """Return the path of forwards with these hidden states: its name, or "eager" with why."""
        return self.name

    def measuring(self, pool: KVPool) -> AbstractContextManager[None]:
        """Return a context for forwards of random tokens that are timed."""
        return nullcontext()

    def max_idle_bytes(self, pool: KVPool) -> int:
        """Return the bytes up to which an idle pool is kept for this path; 0: nothing uses it."""
        return 0

    def num_draft_rows(self, num_requests: int) -> int | None:
        """Return the rows, padding included, of a draft level of this many requests.

        None: it may have any number."""
        return None


@dataclass(frozen=True)
class Resolution:
    """Which forward paths a model uses, and with which settings."""

    # The settings in force: attention, prepack, fused_layers, compile and cuda_graphs may differ
    # from those that were asked for.
    config: SLOSpecConfig
    paths: tuple[str, ...]  # names in the order in which they are tried; the last computes all
    why_not: Mapping[str, str]  # by name of the paths that are left out


def resolve_paths(config: SLOSpecConfig, facts: Facts) -> Resolution:
    """Return the forward paths of a model, for the settings that were asked for.

    Raises:
        UnsupportedOptionError: the model cannot be exact, or weights of several processes cannot
            be prepacked.
    """
    changes: dict[str, Any] = {}
    if facts.num_ranks > 1:
        if config.prepack:
            raise UnsupportedOptionError(
                f"prepack={config.prepack!r} cannot be combined with a tensor-parallel model: each "
                "process would choose kernels by its own times, and what different kernels draft "
                "may differ; leave it out"
            )
        # Captured collectives and fused layers of split weights are untested.
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
    """Yield why the bits of a token's logits may depend on the rest of its batch."""
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
    """Let models use this path; it replaces one of the same name."""
    _PATHS[path.name] = path


def registered_paths() -> list[type[ForwardPath]]:
    """Return the paths of plugins and of other distributions, in their order."""
    load_plugins()
    for path in load_entry_points(ENTRY_POINTS):
        register_path(path)
    return sorted(_PATHS.values(), key=lambda path: path.order)


def make_paths(
    resolution: Resolution, context: PathContext, eager: ForwardPath
) -> list[ForwardPath]:
    """Return the paths of a model, of which ``eager`` is the last."""
    return [*(_PATHS[name](context, eager) for name in resolution.paths[:-1]), eager]
