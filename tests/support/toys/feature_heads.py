"""Random heads of small targets, and drafters of them that are checked in every step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from transformers import Qwen3Config

from hf_slospec import Plan, SLOSpecConfig, TokenTree
from hf_slospec.drafters.features import FeatureDrafter
from hf_slospec.heads.dflash import DFlashHead
from hf_slospec.heads.loading import load_head
from tests.heads.checkpoints import (
    CONFIGS,
    HIDDEN,
    eagle3_tensors,
    mtp_tensors,
    published_config,
    target_of,
    write,
)
from tests.support.toys.tiny_models import VOCAB

DRAFTS_ALWAYS = SLOSpecConfig(policy="fixed", max_depth=3, max_width=3, check_invariants=True)
BLOCK = 5
MASK = 100
FLAGS = {"norm_before_residual"}


def eagle3_folder(folder):
    config = published_config(**dict.fromkeys(FLAGS, True))
    return write(folder / "eagle3", config, eagle3_tensors(FLAGS))


def mtp_folder(folder):
    tensors = {f"mtp.{name}": tensor for name, tensor in mtp_tensors("llama").items()}
    return write(folder / "mtp", CONFIGS["llama"], tensors)


def dflash_config(**changes):
    sizes = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, head_dim=8
    )
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=160)
    own = dict(block_size=BLOCK, mask_token_id=MASK, target_layer_ids=[1, 4])
    return dict(architectures=["DFlashDraftModel"], dflash_config=own) | sizes | heads | changes


def dflash_folder(folder):
    torch.manual_seed(4)
    fields = dflash_config()
    target = target_of("llama")
    config = Qwen3Config.from_dict(
        {name: value for name, value in fields.items() if name != "architectures"}
    )
    own = DFlashHead(
        config, target.get_input_embeddings(), target.get_output_embeddings()
    ).state_dict()
    names = [name for name in own if not name.startswith(("embed_tokens", "lm_head"))]
    tensors = {name: own[name] + 0.3 * torch.randn_like(own[name]) for name in names}
    return write(folder / "dflash", fields, tensors)


FOLDERS = {
    "eagle3": eagle3_folder,
    "mtp": mtp_folder,
    "dflash": dflash_folder,
}


def random_head(kind, folder, target=None):
    return load_head(FOLDERS[kind](folder), target_of("llama") if target is None else target)


@torch.no_grad()
def features_of(target, tokens, layers):
    """The features of all tokens but the last, by a plain forward.  -> [num_tokens - 1,
    num_features]
    """
    states = target(
        torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False
    ).hidden_states
    return torch.cat([states[layer][0] for layer in layers], dim=-1)


Expected = Callable[[list[int], torch.Tensor, int, Plan], dict[tuple[int, ...], float]]


class Checks:
    """Compares the trees of a drafter with those of plain forwards; the engine gets trees of the
    right tokens instead.

    A request's right tokens are those of the text that begins alike, so that steps commit several
    tokens at a time."""

    def __init__(self, target, expected, texts=()):
        self.target = target
        self.expected = expected
        self.texts = texts
        self.first = {}  # first place that the head knows of requests with a gap, by request index
        self.skips = lambda call: False  # calls without drafting
        self.num_calls = self.num_checked = self.num_unready = 0

    def check(self, request, tree, plan, layers):
        first = self.first.get(request.index, 0)
        tokens = list(request.tokens)
        features = features_of(self.target, tokens, layers)[first:]
        expected = self.expected(tokens, features, first, plan)
        paths = [()]
        for parent, token in zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist(), strict=True):
            paths.append((*paths[parent], token))
        found = dict(zip(paths[1:], tree.path_probs[1:].tolist(), strict=True))
        assert found.keys() == expected.keys(), f"request {request.index} at {len(tokens)} tokens"
        assert found == pytest.approx(expected, rel=1e-3)
        self.num_checked += 1

    def right(self, request, plan):
        text = next(
            (text for text in self.texts if text[: len(request.tokens)] == request.tokens), []
        )
        chain = [token if place % 5 else (token + 1) % VOCAB for place, token in enumerate(text)]
        return TokenTree.chain(request.tokens[-1], chain[len(request.tokens) :][: plan.depth], 0.9)

    @contextmanager
    def on(self, monkeypatch):
        draft = FeatureDrafter.draft

        def checked(drafter, requests, plan):
            self.num_calls += 1
            if self.skips(self.num_calls):
                return [TokenTree.root_only(request.tokens[-1]) for request in requests]
            trees = draft(drafter, requests, plan)
            for request, tree in zip(requests, trees, strict=True):
                tree.check()
                if tree.max_depth:
                    self.check(request, tree, plan, drafter.feature_layers)
                else:
                    self.num_unready += 1
            return [self.right(request, plan) for request in requests]

        with monkeypatch.context() as patched:
            patched.setattr(FeatureDrafter, "draft", checked)
            yield self
