"""Creation of the heads that are trained, and writing of their checkpoints."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_slospec.errors import UnsupportedModelError
from hf_slospec.heads.checkpoint import hidden_size_of, num_layers_of
from hf_slospec.heads.dspark import DSparkHead
from hf_slospec.heads.eagle3 import Eagle3Head, Eagle3Settings, default_feature_layers
from hf_slospec.heads.layouts import BLOCK_SETTINGS
from hf_slospec.heads.mtp import MtpHead, own_modules
from hf_slospec.model.properties import input_device, vocab_size
from hf_slospec.training.options import TrainingOptions

MIN_DRAFT_VOCAB = 1024  # Smallest draft vocabulary that is chosen by default.
WRITTEN_DTYPE = torch.bfloat16
BLOCK_LAYERS = 2  # Layers of a DSpark head.
MAX_RANK = 256  # Largest rank of a Markov head, for hidden states of 2048 and more.

Student = Eagle3Head | MtpHead | DSparkHead


def new_head(options: TrainingOptions, target: PreTrainedModel, counts: torch.Tensor) -> Student:
    """Return an untrained head. Its final norm and, if it has an output layer, the rows of that
    layer are copies of the target's.

    Args:
        options: the kind, draft vocabulary and seed.
        target: the model to draft for.
        counts: [vocab] int64, number of occurrences of each token in the texts.

    Raises:
        UnsupportedModelError: a head of this kind cannot be made for the target.
    """
    torch.manual_seed(options.seed)
    head: Any = _mtp(target) if options.kind == "mtp" else _reading_layers(options, target, counts)
    # The backward pass of fused attention with a mask is slow on CPUs.
    head.config._attn_implementation = "eager"
    head.to(input_device(target))
    made: Student = head
    return made


def _mtp(target: PreTrainedModel) -> MtpHead:
    decoder: Any = target.get_decoder()
    try:
        head = MtpHead(target)
        head.norm.load_state_dict(decoder.norm.state_dict())
    except (AttributeError, TypeError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"--kind mtp cannot use the layers of {type(target).__name__}: {error}; give --kind "
            "eagle3"
        ) from error
    return head


def _reading_layers(
    options: TrainingOptions, target: PreTrainedModel, counts: torch.Tensor
) -> Eagle3Head | DSparkHead:
    """Return an EAGLE-3 or DSpark head, which reads hidden states of several target layers."""
    size = hidden_size_of(target)
    vocab = vocab_size(target)
    layers = default_feature_layers(num_layers_of(target))
    if min(layers) < 0:
        name = {"eagle3": "an EAGLE-3", "dspark": "a DSpark"}[options.kind]
        raise UnsupportedModelError(
            f"{name} head reads layers {layers}, and the target has too few; give --kind mtp"
        )
    output: Any = target.get_output_embeddings()
    draft_vocab = (
        max(MIN_DRAFT_VOCAB, vocab // 4) if options.draft_vocab is None else options.draft_vocab
    )
    is_reduced = 0 < draft_vocab < vocab
    shared: Any = target.get_input_embeddings(), None if is_reduced else output
    own_vocab = draft_vocab if is_reduced else vocab
    head: Any
    if options.kind == "dspark":
        head = DSparkHead(_config_of_block(options, target, layers, own_vocab, counts), *shared)
    else:
        config = LlamaConfig(num_hidden_layers=1, **_sizes(target))
        head = Eagle3Head(config, Eagle3Settings(layers, size, own_vocab), *shared)
    with torch.no_grad():
        if is_reduced:
            frequent = counts.argsort(descending=True, stable=True)[:draft_vocab].sort().values
            head.set_vocabulary(frequent.to(input_device(target)))
            head.lm_head.weight.copy_(output.weight[frequent.to(output.weight.device)])
        if (norm := getattr(target.get_decoder(), "norm", None)) is not None:
            # Applied to ones, an RMS norm returns its weights, in whatever form the target's class
            # stores them.
            head.norm.weight.copy_(
                norm(torch.ones(1, size, dtype=target.dtype, device=input_device(target)))[0]
            )
        # Scale the final norm so that the logits of the random layers start with a standard
        # deviation of 1.
        head.norm.weight.div_(
            (head.lm_head.weight.to(head.norm.weight) * head.norm.weight).norm(dim=-1).mean()
        )
    read: Eagle3Head | DSparkHead = head
    return read


def _config_of_block(
    options: TrainingOptions,
    target: PreTrainedModel,
    layers: tuple[int, ...],
    draft_vocab: int,
    counts: torch.Tensor,
) -> Qwen3Config:
    block: dict[str, Any] = dict(
        num_hidden_layers=BLOCK_LAYERS,
        block_size=options.levels,
        mask_token_id=len(counts)
        - 1
        - int(counts.flip(0).argmin()),  # the last of the rarest tokens
        aux_hidden_state_layer_ids=list(layers),
        draft_vocab_size=draft_vocab,
        sample_from_anchor=True,
        sliding_window_non_causal=False,
        markov_rank=min(MAX_RANK, max(8, hidden_size_of(target) // 8)),
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    return Qwen3Config(**block, **_sizes(target))


def _sizes(target: PreTrainedModel) -> dict[str, Any]:
    """Return config fields of a decoder layer with the target's sizes; fields that the target's
    config lacks get Llama's defaults.
    """
    config: Any = target.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    size = hidden_size_of(target)
    num_heads = config.num_attention_heads
    return dict(
        vocab_size=vocab_size(target),
        hidden_size=size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * size,
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or size // num_heads,
        max_position_embeddings=getattr(config, "max_position_embeddings", None) or 2048,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        rope_parameters=rope
        if rope.get("rope_type") in ("default", *ROPE_INIT_FUNCTIONS)
        else None,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def write_head(head: Student, target: PreTrainedModel, options: TrainingOptions) -> None:
    """Write config.json and model.safetensors (bf16) of a head to ``options.out``; older files are
    replaced.
    """
    tensors = {
        name: tensor.detach().to("cpu", WRITTEN_DTYPE).contiguous()
        for name, tensor in own_modules(head, target).state_dict().items()
    }
    layer = {
        name: value
        for name, value in head.config.to_diff_dict().items()
        if not name.startswith("_")
    }
    layer |= {
        "model_type": head.config.model_type,
        "dtype": str(WRITTEN_DTYPE).removeprefix("torch."),
    }
    if head.target_ids is not None:
        ids = head.target_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocab_size(target)).bool()
        tensors["t2d"][ids] = True
    if options.embeddings:
        ids = torch.arange(vocab_size(target), device=input_device(target))
        with torch.no_grad():  # as the module returns them: those of some targets have a factor
            embeds = target.get_input_embeddings()(ids)
        tensors["embed_tokens.weight"] = embeds.to("cpu", WRITTEN_DTYPE)
    if isinstance(head, MtpHead):
        tensors = {f"mtp.{name}": tensor for name, tensor in tensors.items()}
        config = layer | {"architectures": [type(head).__name__], "num_mtp_layers": 1}
    elif options.layout == "sglang":
        config = _sglang_config(head, layer)
    else:
        tensors = {
            name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()
        }
        config = _speculators_config(head, target, layer, options)
    partial = options.out / "training" / "model.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    (options.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(options.out / "model.safetensors")


def _speculators_config(
    head: Eagle3Head | DSparkHead,
    target: PreTrainedModel,
    layer: dict[str, Any],
    options: TrainingOptions,
) -> dict[str, Any]:
    proposals = {"proposal_type": "greedy", "speculative_tokens": options.levels}
    if isinstance(head, DSparkHead):
        settings = {name: layer.pop(name) for name in BLOCK_SETTINGS if name in layer}
    else:
        settings = {
            "draft_vocab_size": head.settings.draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": list(head.feature_layers),
            "norm_before_residual": False,  # vLLM's default is True
        }
    return {
        "architectures": [
            "DSparkDraftModel" if isinstance(head, DSparkHead) else "Eagle3DraftModel"
        ],
        "speculators_model_type": options.kind,
        "speculators_config": {
            "algorithm": options.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposals | {"accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {
                "name_or_path": target.config.name_or_path,
                "architectures": target.config.architectures or [type(target).__name__],
            },
        },
        "transformer_layer_config": layer,
        **settings,
        "tie_word_embeddings": False,
        "dtype": layer["dtype"],
    }


def _sglang_config(head: Any, layer: dict[str, Any]) -> dict[str, Any]:
    # Hidden state i is the output of layer i - 1, counted from 0.
    layers = [layer - 1 for layer in head.feature_layers]
    return layer | {
        "architectures": ["LlamaForCausalLMEagle3"],
        # None: SGLang uses the target's output layer.
        "draft_vocab_size": None if head.target_ids is None else head.settings.draft_vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
    }
