"""Function-preserving inflation: a model of larger size with the same outputs.

Additional hidden channels are exactly zero; additional heads, MLP neurons and layers contribute
exactly zero, and additional token ids are never chosen. All of them are computed, so that texts and
acceptance are those of the small model while time and memory are those of the larger shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_slospec.errors import InvalidInputError
from hf_slospec.heads.eagle3 import Eagle3Head
from hf_slospec.heads.mtp import MtpHead, own_modules
from hf_slospec.tiny.shapes import Shape

Head = TypeVar("Head", Eagle3Head, MtpHead)


@torch.no_grad()
def inflate(model: LlamaForCausalLM, shape: Shape, seed: int = 0) -> LlamaForCausalLM:
    """Return a larger model with the logits of ``model``, up to the rounding of longer sums.

    Larger heads also round their queries, which are scaled by the square root of the ratio of head
    sizes. Additional ids have logits below -100.

    Args:
        model: a Llama without biases, with plain rotary embeddings.
        shape: the new size; no dimension may be smaller than before.
        seed: seed of the random weights, which do not affect the output.

    Raises:
        InvalidInputError: the shape is smaller than the model, or not a multiple of its hidden and
            head sizes; it has additional ids for a model in fp16; or the model has biases.
    """
    config = config_of(model, shape)
    with torch.device(model.device):
        larger: LlamaForCausalLM = LlamaForCausalLM._from_config(config, dtype=model.dtype).eval()
    _fill(larger, model, Placement(model.config, config), seed)
    larger.generation_config = model.generation_config
    return larger


def config_of(model: LlamaForCausalLM, shape: Shape) -> LlamaConfig:
    """Return the config of an inflated model; raises as :func:`inflate` does."""
    old: Any = model.config
    if old.attention_bias or old.mlp_bias:
        raise InvalidInputError(
            "a model with biases cannot be inflated; use one without attention and MLP biases"
        )
    factor = max(shape.hidden_size // old.hidden_size, 1)
    scaled = ("num_attention_heads", "num_key_value_heads")
    sizes = {name: size for name, size in shape._asdict().items() if size is not None}
    for name in shape._fields:
        size = getattr(old, name)
        sizes.setdefault(name, size * factor if name in scaled else size)
    shape = Shape(**sizes)
    _check_holds(shape, old, model.dtype)
    # The additional channels are zero, so the mean square is smaller by the factor, and epsilon
    # must be, too.
    return LlamaConfig(**old.to_dict() | sizes | {"rms_norm_eps": old.rms_norm_eps / factor})


@torch.no_grad()
def inflate_head(
    head: Head,
    plain: LlamaForCausalLM,
    target: LlamaForCausalLM,
    shape: Shape | None = None,
    seed: int = 0,
) -> Head:
    """Return a larger head that drafts for an inflated target what ``head`` drafts for the plain
    one.

    Args:
        head: an EAGLE-3 head or MTP layer of ``plain``.
        plain: the model before :func:`inflate`.
        target: the inflated model.
        shape: size of an EAGLE-3 head, of the target's hidden size; its ``vocab_size`` is that of
            the head's own ids. None: scaled with the hidden size, with the same ids.
        seed: seed of the random weights, which do not affect the output.

    Raises:
        InvalidInputError: the shape cannot hold the head.
    """
    if shape is not None and (why_not := _why_no_head(head, plain, target, shape)) is not None:
        raise InvalidInputError(f"{shape} cannot hold this head: {why_not}")
    factor = target.config.hidden_size // plain.config.hidden_size
    larger: Any
    old: Any = head.config
    with torch.device(target.device):
        if isinstance(head, Eagle3Head):
            config = LlamaConfig(**old.to_dict() | {
                "hidden_size": target.config.hidden_size,
                "intermediate_size": max(old.intermediate_size, target.config.intermediate_size),
                "num_attention_heads": old.num_attention_heads * factor,
                "num_key_value_heads": old.num_key_value_heads * factor,
                "rms_norm_eps": old.rms_norm_eps / factor,
            } | (shape._asdict() if shape else {}) | {
                "tie_word_embeddings": False,
                "vocab_size": target.config.vocab_size,
            })  # fmt: skip
            ids = head.target_ids
            if ids is not None and shape is not None:
                assert shape.vocab_size is not None
                more = torch.arange(shape.vocab_size - len(ids), device=ids.device)
                ids = torch.cat((ids, more + plain.config.vocab_size))
            settings = replace(
                head.settings,
                target_hidden_size=target.config.hidden_size,
                draft_vocab_size=head.draft_vocab_size if ids is None else len(ids),
            )
            larger = Eagle3Head(config, settings, target.get_input_embeddings())
            if ids is not None:
                larger.set_vocabulary(ids)
        else:
            larger = MtpHead(target)
    larger.to(target.dtype).eval()
    _fill(
        own_modules(larger, target),
        own_modules(head, plain),
        Placement(old, larger.config),
        seed,
    )
    if isinstance(head, Eagle3Head) and larger.draft_vocab_size > head.draft_vocab_size:
        _exclude_draft_ids(larger, head)
    inflated: Head = larger
    return inflated


def _why_no_head(head: Any, plain: Any, target: Any, shape: Shape) -> str | None:
    """Return why a head cannot be inflated to a shape; None if it can."""
    if not isinstance(head, Eagle3Head) or head.target_ids is None:
        return "it is no EAGLE-3 head with ids of its own"
    if None in shape[:-1]:
        return "all its sizes must be given"
    old: Any = head.config
    if shape.hidden_size != target.config.hidden_size or shape.num_hidden_layers != 1:
        return f"it needs the target's hidden size {target.config.hidden_size}, and one layer"
    if old.num_hidden_layers != 1 or old.attention_bias:
        return "the head must have one layer, without biases"
    sizes: Any = shape
    if sizes.num_key_value_heads <= old.num_key_value_heads:
        return f"it needs more than {old.num_key_value_heads} K/V heads"
    num_more = sizes.vocab_size - head.draft_vocab_size
    if not 0 <= num_more <= target.config.vocab_size - plain.config.vocab_size:
        return f"it needs at least {head.draft_vocab_size} ids, and a target with as many additional ids"
    return None


def _exclude_draft_ids(larger: Eagle3Head, head: Eagle3Head) -> None:
    """Set weights of an inflated head that give its additional ids very low logits.

    The inflated target's embeddings have a constant channel. An additional K/V head carries it to
    the hidden state: attention weights are positive and sum to 1, so that it stays near that value
    whatever the tokens are. Only the output layer reads it there.
    """
    layer: Any = larger.midlayer
    config: Any = larger.config
    attention = layer.self_attn
    channel = head.config.hidden_size
    free = head.config.num_key_value_heads  # the first K/V head that holds nothing
    first_query = free * (config.num_attention_heads // config.num_key_value_heads)
    layer.input_layernorm.weight[channel] = (config.hidden_size / channel) ** -0.5
    layer.hidden_norm.weight[channel] = 0.0
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[:, channel] = 0.0
    attention.v_proj.weight[free * config.head_dim] = 0.0
    attention.v_proj.weight[free * config.head_dim, channel] = 1.0
    attention.o_proj.weight[channel, first_query * config.head_dim] = 1.0
    output: Any = larger.lm_head.weight
    output[:, channel] = 0.0
    output[head.draft_vocab_size :] = 0.0
    output[head.draft_vocab_size :, channel] = NEVER


def _check_holds(shape: Any, old: Any, dtype: torch.dtype) -> None:
    """Raise InvalidInputError if a model with this config and dtype cannot be inflated to
    ``shape``, a :class:`Shape` without None.
    """
    num_heads = shape.num_attention_heads
    num_kv_heads = shape.num_key_value_heads
    vocab_size = shape.vocab_size
    needs = {
        f"a multiple of hidden size {old.hidden_size}": shape.hidden_size % old.hidden_size == 0,
        f"at least {old.intermediate_size} MLP neurons": shape.intermediate_size
        >= old.intermediate_size,
        f"at least {old.num_hidden_layers} layers": shape.num_hidden_layers
        >= old.num_hidden_layers,
        f"a multiple of head size {old.head_dim}": shape.head_dim % old.head_dim == 0,
        f"at least {old.num_key_value_heads} K/V heads": num_kv_heads >= old.num_key_value_heads,
        "for each K/V head as many heads as before, or more": num_heads % num_kv_heads == 0
        and num_heads // num_kv_heads >= old.num_attention_heads // old.num_key_value_heads,
        f"at least {old.vocab_size} ids": vocab_size >= old.vocab_size,
        "additional ids only with a larger hidden size": vocab_size == old.vocab_size
        or shape.hidden_size > old.hidden_size,
        "additional ids only in bf16 or fp32": vocab_size == old.vocab_size
        or dtype != torch.float16,
        "tied embeddings only if the model has them": old.tie_word_embeddings
        or not shape.tie_word_embeddings,
    }
    if missing := [need for need, is_met in needs.items() if not is_met]:
        raise InvalidInputError(
            f"{shape} cannot hold this model: it must have {', '.join(missing)}"
        )


def _fill(
    larger: torch.nn.Module, source: torch.nn.Module, placement: Placement, seed: int
) -> None:
    """Fill the weights of a larger model from those of a smaller one."""
    sources = dict(source.named_parameters())
    generators = dict[torch.device, torch.Generator]()
    for name, parameter in larger.named_parameters():
        generator = generators.setdefault(
            parameter.device, torch.Generator(parameter.device).manual_seed(seed)
        )
        shared = "model.embed_tokens.weight" if name == "lm_head.weight" else name  # if tied
        placement.fill(name, parameter, sources.get(name, sources.get(shared)), generator)


# One hidden channel tells the output layer to exclude the additional token ids. It has this value
# at every token, which is too small to change a norm, and only the output layer reads it.
DELTA = 2.0**-13
NEVER = -(2.0**32)  # weight of that channel in logits of additional ids; beyond fp16's range


@dataclass(frozen=True)
class Placement:
    """Placement of the weights of a Llama, or of a head with Llama's layers, in a larger model."""

    old: Any
    larger: Any

    @property
    def factor(self) -> int:
        """Larger hidden size / old hidden size."""
        return int(self.larger.hidden_size // self.old.hidden_size)

    def fill(
        self,
        name: str,
        parameter: torch.Tensor,
        source: torch.Tensor | None,
        generator: torch.Generator,
    ) -> None:
        """Copy the old weights; set weights that write to hidden channels to zero, and unused
        weights to random values.

        Args:
            name: name of the parameter in its model.
            parameter: the larger weight.
            source: the old one; None for a weight of an additional layer.
            generator: draws the random values, on the parameter's device.
        """
        module = name.rpartition(".")[0].rpartition(".")[2]
        if "norm" in name:
            parameter.fill_(self.factor**-0.5)
        elif module in ("o_proj", "down_proj", "embed_tokens", "fc"):
            parameter.zero_()
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
        if source is not None:
            self._copy(name, parameter, source)
        if self.larger.vocab_size > self.old.vocab_size:
            self._exclude(name, module, parameter)

    def _copy(self, name: str, parameter: torch.Tensor, source: torch.Tensor) -> None:
        device = parameter.device
        scale = 1.0
        rows = torch.arange(len(source), device=device)
        if "norm" in name:
            scale = self.factor**-0.5
        elif ".q_proj." in name:
            rows = self._channels(is_query=True).to(device)
            # Zeros in the additional query channels add nothing to the attention scores. Scores
            # are divided by the root of the head size, which ``scale`` compensates.
            used = rows.view(self.old.num_attention_heads, -1)[:, 0] // self.larger.head_dim
            parameter.unflatten(0, (self.larger.num_attention_heads, -1))[used] = 0.0
            scale = (self.larger.head_dim // self.old.head_dim) ** 0.5
        elif ".k_proj." in name or ".v_proj." in name:
            rows = self._channels(is_query=False).to(device)
        if source.dim() == 1 and "norm" not in name:  # a bias
            parameter[rows] = source * scale
            return
        columns = torch.arange(source.shape[-1], device=device)
        if ".o_proj." in name:
            columns = self._channels(is_query=True).to(device)
        elif ".down_proj." not in name:  # its input is one hidden state, or several concatenated
            block = columns // self.old.hidden_size
            columns = columns + block * (self.factor - 1) * self.old.hidden_size
        if source.dim() == 1:
            parameter[columns] = source * scale
        else:
            parameter[rows[:, None], columns] = source * scale

    def _channels(self, is_query: bool) -> torch.Tensor:
        """Return the index in the larger model of every channel of the old heads.  -> [num_heads *
        head_dim] int64

        Rotary embeddings turn channel pairs (i, i + head_dim / 2) by the frequency theta ** (-2i /
        head_dim), so that pair i of a small head turns like pair ``ratio`` * i of a head that is
        ``ratio`` times as large."""
        old = self.old
        larger = self.larger
        heads = torch.arange(old.num_attention_heads if is_query else old.num_key_value_heads)
        group = old.num_attention_heads // old.num_key_value_heads if is_query else 1
        larger_group = larger.num_attention_heads // larger.num_key_value_heads if is_query else 1
        heads = heads // group * larger_group + heads % group
        channels = torch.arange(old.head_dim)
        half = old.head_dim // 2
        ratio = larger.head_dim // old.head_dim
        channels = channels // half * (larger.head_dim // 2) + channels % half * ratio
        positions: torch.Tensor = heads[:, None] * larger.head_dim + channels
        return positions.flatten()

    def _exclude(self, name: str, module: str, parameter: torch.Tensor) -> None:
        """Set weights of the first additional channel that give additional ids very low logits."""
        channel = self.old.hidden_size
        if module in ("embed_tokens", "lm_head"):
            parameter[: self.old.vocab_size, channel] = DELTA if module == "embed_tokens" else 0.0
            parameter[self.old.vocab_size :] = 0.0
            parameter[self.old.vocab_size :, channel] = NEVER
        elif module.endswith("layernorm"):
            parameter[channel] = 0.0
        elif name == "fc.weight" and parameter.shape[1] == 2 * self.old.hidden_size * self.factor:
            parameter[channel, channel] = 1.0  # an MTP layer: its input begins with the embedding
