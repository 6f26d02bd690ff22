"""Train a drafting head for a target: an EAGLE-3 head, or a multi-token prediction (MTP) layer.

    python scripts/train_head.py --kind eagle3             # for the embedded target
    python scripts/train_head.py --kind mtp --target org/name --text corpus.txt --out head

Half of the windows are text (of the standard library for the embedded target), half are the target's own, greedy and
sampled at temperature 1. Levels are unrolled as in drafting: level j takes the hidden states of level j - 1 and the
text's tokens, and its entries attend to those of the first level before them and to their own earlier levels. The loss
is the cross-entropy to the target's distribution. Checkpoints are written to ``--work``, and a run resumes from them.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm import tqdm
from train_tiny_pair import Trainer, encode_corpus
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig

from hf_slospec import load_tiny_pair
from hf_slospec.drafters.heads.eagle3 import Eagle3Head, Eagle3Settings, default_feature_layers
from hf_slospec.drafters.heads.head import DraftHead, own_modules
from hf_slospec.drafters.heads.mtp import MtpHead

PROMPT_LEN, ROWS_PER_CALL = 48, 512
EVAL_ROWS, EVAL_LEVELS = 64, 6
FLAGS = ["norm_before_residual", "norm_output", "norm_before_fc", "fc_norm"]
LEVEL_WEIGHT = 0.8  # a level's loss counts so much relative to the level above


@dataclass(frozen=True)
class Plan:
    """Settings of a training run."""

    kind: str
    target: str | None
    text: Path | None
    seed: int
    steps: int
    batch: int
    seq_len: int
    levels: int
    stride: int
    sampled_rows: int
    draft_vocab: int
    flags: list[str]
    work: Path
    out: Path


@dataclass(frozen=True, eq=False)
class Models:
    """The target with what belongs to it."""

    target: Any
    draft: Any  # to compare with; None if there is none
    train: torch.Tensor  # [num_tokens] int64
    held_out: torch.Tensor  # [num_tokens] int64


def load_models(plan: Plan) -> Models:
    """Return the target, and its text split into one for training and one that is held out."""
    if plan.target is None:
        target, draft, tokenizer = load_tiny_pair()
        texts = encode_corpus(tokenizer, False, plan.seed), encode_corpus(tokenizer, True, plan.seed)
        return Models(target, draft, *texts)
    assert plan.text is not None, "--target needs --text"
    target = AutoModelForCausalLM.from_pretrained(plan.target, dtype=torch.float32)
    ids = torch.tensor(AutoTokenizer.from_pretrained(plan.target)(plan.text.read_text(encoding="utf-8"))["input_ids"])
    num_held_out = len(ids) // 20
    return Models(target, None, ids[num_held_out:], ids[:num_held_out])


@torch.no_grad()
def continued(target: Any, data: torch.Tensor, rows: int, length: int, seed: int, greedy: bool) -> torch.Tensor:
    """Return prompts from ``data`` with continuations by the target.  -> [rows, length] int64"""
    torch.manual_seed(seed)
    starts = torch.randint(len(data) - PROMPT_LEN, (rows,)).tolist()
    prompts = torch.stack([data[start : start + PROMPT_LEN] for start in starts])
    new = length - PROMPT_LEN
    sampling: dict[str, Any] = {} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    ids: torch.Tensor = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=not greedy,
        min_new_tokens=new,
        max_new_tokens=new,
        **sampling,
    )
    return ids


def sample_from_target(plan: Plan, models: Models) -> torch.Tensor:
    """Return texts by the target, in turn greedy and sampled, unless they exist.  -> [num_rows, seq_len] int64"""
    path = plan.work / f"samples-{plan.seed}-{plan.sampled_rows}-{plan.seq_len}.pt"
    if not path.exists():
        models.target.to(torch.bfloat16)
        calls = range(plan.sampled_rows // ROWS_PER_CALL)
        rows = [
            continued(models.target, models.train, ROWS_PER_CALL, plan.seq_len, plan.seed + call, greedy=call % 2 == 0)
            for call in tqdm(calls, desc="sampling")
        ]
        models.target.float()
        partial = path.with_suffix(".partial")
        torch.save(torch.cat(rows), partial)
        partial.replace(path)
    samples: torch.Tensor = torch.load(path, weights_only=True)
    return samples


def new_head(plan: Plan, models: Models, samples: torch.Tensor) -> DraftHead:
    """Return a head that starts from the target's final norm and, where it has logits of its own, output rows."""
    torch.manual_seed(plan.seed)
    decoder, config = models.target.get_decoder(), models.target.config.get_text_config()
    head: Any
    if plan.kind == "mtp":
        head = MtpHead(models.target)
    else:
        shape = {name: getattr(config, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
        layer = LlamaConfig(
            vocab_size=config.vocab_size,
            num_hidden_layers=1,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=config.rope_parameters,
            tie_word_embeddings=False,
            **shape,
        )
        layers = default_feature_layers(len(decoder.layers))
        flags = dict.fromkeys(plan.flags, True)
        settings = Eagle3Settings(layers, config.hidden_size, plan.draft_vocab, **flags)
        head = Eagle3Head(layer, settings, models.target.get_input_embeddings())
        counts = torch.bincount(torch.cat((models.train, samples.flatten())), minlength=config.vocab_size)
        most = counts.topk(plan.draft_vocab).indices.sort().values
        print(f"the {plan.draft_vocab} most frequent tokens are {float(counts[most].sum() / counts.sum()):.2%} of all")
        head.set_vocabulary(most)
        head.lm_head.weight.data.copy_(models.target.get_output_embeddings().weight[most])
    head.norm.load_state_dict(decoder.norm.state_dict())
    return head


def unrolled(
    head: DraftHead, ids: torch.Tensor, features: torch.Tensor, levels: int, first: int = 0, stride: int = 1
) -> list[tuple[torch.Tensor, slice]]:
    """Return the logits of all levels with the positions whose next tokens they predict.

    The first level has an entry for every token. Levels below it have them for every ``stride``-th from ``first`` on,
    since entries of different texts of drafted tokens do not attend to each other.

    Args:
        head: the network.
        ids: [batch, length] int64.
        features: [batch, length, features].
        levels: number of levels.
        first: index of the first entry that goes on below the first level.
        stride: distance of these entries.

    Returns:
        Per level, logits [batch, entries, vocab] and a slice of the length.
    """
    num_entries = ids.shape[1] - 1 - levels
    picked = torch.arange(first, num_entries, stride)
    cache, hidden, index = DynamicCache(), head.combine(features[:, :num_entries]), torch.arange(num_entries)
    mask, results = torch.ones(num_entries, num_entries, dtype=torch.bool).tril(), []
    for level in range(levels):
        embeds = head.embed_tokens(ids[:, index + 1 + level])
        bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf).expand(len(ids), 1, -1, -1)
        states, hidden = head.run(embeds, hidden, index[None] + level, cache, bias)
        begin, step = (1, 1) if level == 0 else (first + 1 + level, stride)
        results.append((head.logits(states), slice(begin, num_entries + 1 + level, step)))
        if level == 0:
            hidden, index, mask = hidden[:, picked], picked, mask[picked]
        mask = torch.cat((mask, torch.eye(len(picked), dtype=torch.bool)), dim=1)  # [entries, keys of all levels]
    return results


@torch.no_grad()
def read_target(head: DraftHead, target: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features that a head takes and the target's logits, [batch, length, ...] each."""
    out = target(ids, use_cache=False, output_hidden_states=True)
    return torch.cat([out.hidden_states[layer] for layer in head.feature_layers], dim=-1), out.logits


def train(plan: Plan, models: Models, head: DraftHead, samples: torch.Tensor) -> float:
    """Train the head; return the seconds it took, not counting those before a resumption."""
    vocab = slice(None) if head.target_ids is None else head.target_ids

    def windows(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
        own = samples[torch.randint(len(samples), (plan.batch // 2,), generator=generator)]
        starts = torch.randint(len(models.train) - plan.seq_len, (plan.batch - len(own),), generator=generator)
        return torch.cat((own, torch.stack([models.train[s : s + plan.seq_len] for s in starts.tolist()])))

    def loss_at(step: int) -> torch.Tensor:
        ids = windows(step)
        with torch.autocast("cpu", torch.bfloat16):
            features, teacher = read_target(head, models.target, ids)
            results = unrolled(head, ids, features.float(), plan.levels, step % plan.stride, plan.stride)
        probs = teacher.float().softmax(-1)[..., vocab]  # [batch, length, draft_vocab]
        loss = torch.zeros(())
        for level, (logits, places) in enumerate(results):
            wanted = probs[:, places].flatten(0, 1)
            loss = loss + LEVEL_WEIGHT**level * F.cross_entropy(logits.float().flatten(0, 1), wanted)
        return loss / sum(LEVEL_WEIGHT**level for level in range(plan.levels))

    models.target.requires_grad_(False)
    head.config._attn_implementation = "eager"  # the backward pass of fused attention with a mask is slow on CPUs
    begin = time.monotonic()
    Trainer(own_modules(head, models.target), plan.steps, plan.work / f"{plan.kind}.pt").run(loss_at, plan.kind)
    return time.monotonic() - begin


@torch.no_grad()
def agreement(head: DraftHead, models: Models, seed: int) -> dict[str, list[float]]:
    """Return how often top-1 tokens are the target's, per level, on greedy text of the target from held-out prompts.

    ``agrees`` counts a level for itself, after the text's own tokens; ``accepted`` counts it only if all levels above
    agree too, which is how often a chain of drafted tokens is accepted to this depth.
    """
    length = PROMPT_LEN + 160
    ids = continued(models.target, models.held_out, EVAL_ROWS, length, seed, greedy=True)
    features, logits = read_target(head, models.target, ids)
    choices = logits.argmax(-1)
    results = unrolled(head, ids, features, EVAL_LEVELS)
    students = [logits.argmax(-1) for logits, _ in results]
    if head.target_ids is not None:
        students = [head.target_ids[student] for student in students]
    wanted = [choices[:, places] for _, places in results]
    rows = {"head": students}
    if models.draft is not None:
        own = models.draft(ids, use_cache=False).logits.argmax(-1)
        rows["draft"] = [own[:, places] for _, places in results]
    result = {}
    for name, tokens in rows.items():
        hits = torch.stack([(a == b)[:, PROMPT_LEN - 1 :] for a, b in zip(tokens, wanted, strict=True)]).float()
        result[f"{name} agrees"] = [round(float(hit), 4) for hit in hits.mean((1, 2))]
        result[f"{name} accepted"] = [round(float(hit), 4) for hit in hits.cumprod(0).mean((1, 2))]
    return result


def write(plan: Plan, models: Models, head: DraftHead) -> None:
    """Write the head in the published layout, in bf16."""
    tensors = {
        name: tensor.to(torch.bfloat16) for name, tensor in own_modules(head, models.target).state_dict().items()
    }
    config: dict[str, Any] = head.config.to_diff_dict() | {"dtype": "bfloat16"}
    config.pop("_name_or_path", None)
    if isinstance(head, Eagle3Head):
        assert head.target_ids is not None, "a reduced vocabulary"
        tensors["d2t"] = head.target_ids - torch.arange(len(head.target_ids))
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][head.target_ids] = True
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(head.target_ids),
            **{flag: getattr(head.settings, flag) for flag in FLAGS},
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in head.feature_layers],
                "use_aux_hidden_state": True,
            },
        }
    else:
        tensors = {f"mtp.{name}": tensor for name, tensor in tensors.items()}
        config |= {"architectures": ["MtpHead"], "num_mtp_layers": 1}
    save_file(tensors, plan.out / "model.safetensors", metadata={"format": "pt"})
    (plan.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("eagle3", "mtp"), required=True)
    parser.add_argument("--target", help="folder or id; the embedded target by default")
    parser.add_argument("--text", type=Path, help="file of training text, for --target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--levels", type=int, default=6, help="unrolled in training")
    parser.add_argument("--stride", type=int, default=5, help="of the entries below the first level")
    parser.add_argument("--sampled-rows", type=int, default=2048, help="windows of the target's own text")
    parser.add_argument("--draft-vocab", type=int, default=1024, help="tokens that an EAGLE-3 head can draft")
    parser.add_argument("--flags", nargs="*", choices=FLAGS, default=FLAGS[:1], help="of an EAGLE-3 head")
    parser.add_argument("--work", type=Path, default=Path("build/heads"), help="checkpoints; safe to delete")
    parser.add_argument("--out", type=Path, help="default: hf_slospec/tiny/pair/KIND")
    given = vars(parser.parse_args())
    plan = Plan(**given | {"out": given["out"] or Path("hf_slospec/tiny/pair") / given["kind"]})
    for folder in (plan.work, plan.out):
        folder.mkdir(parents=True, exist_ok=True)

    models = load_models(plan)
    samples = sample_from_target(plan, models)
    head = new_head(plan, models, samples)
    seconds = train(plan, models, head, samples)
    write(plan, models, head)
    own_modules(head, models.target).to(torch.bfloat16).float()  # measured as it is written
    parameters = sum(parameter.numel() for parameter in own_modules(head, models.target).parameters())
    facts = {name: value for name, value in asdict(plan).items() if not isinstance(value, Path)}
    facts |= {"parameters": parameters, "seconds": round(seconds), "held_out": agreement(head, models, plan.seed)}
    (plan.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
