"""Heads in the classes of the speculators library, which reads what ``train-drafter`` writes and
defines DFlash2, DSpark and XPress. Skipped without the library, which ordinary environments lack: it
asks for an older transformers than this package. CONTRIBUTING.md says how to install both.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from hf_slospec import SLOSpecGenerator, load_drafter, load_tiny_pair, tiny_prompts
from hf_slospec.heads.loading import load_head
from hf_slospec.training.heads import new_head, write_head
from hf_slospec.training.options import TrainingOptions
from tests.drafters.test_features import texts_of
from tests.heads.checkpoints import eagle3_tensors, speculators_config, target_of, write
from tests.heads.published_blocks import CASES, best_paths
from tests.support.toys.feature_heads import DRAFTS_ALWAYS, Checks, features_of
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts

# The library calls layers with the cache's former name.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
BLOCKS = [
    name for name in CASES if name.startswith(("speculators ds", "speculators x", "speculators dflash2"))
]  # fmt: skip
WIDE = {"sliding_window": 64}
PROPOSALS = {"proposal_type": "greedy", "speculative_tokens": 3}


@pytest.fixture(scope="module")
def loaded():
    """Return a function that loads a folder with the library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("speculators")

    def load(folder):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = library.SpeculatorModelConfig.from_pretrained(folder)
            config.transformer_layer_config._attn_implementation = "eager"
            model = library.SpeculatorModel.from_pretrained(folder, config=config)
        if hasattr(model, "refiner_head"):  # 0.9.0 leaves this mask as it was allocated
            model.refiner_head.causal_tril.fill_(1.0).tril_()
        return model.float().eval()

    return load


class Library:
    """What trees of a block head must be by the library's own modules."""

    def __init__(self, model):
        self.model = model
        self.first_slot = 0 if model.config.sample_from_anchor else 1
        self.ids = torch.arange(model.config.draft_vocab_size)
        if model.d2t is not None:
            self.ids = self.ids + model.d2t

    @torch.no_grad()
    def expected(self, tokens, features, first, plan):
        del first
        size = self.model.block_size
        # The anchor is the last token; the library wants a block behind it.
        ids = torch.tensor([tokens + [0] * size])
        padded = torch.cat((features, torch.zeros(1 + size, features.shape[1])))[None]
        loss_mask = torch.zeros_like(ids)
        loss_mask[0, len(tokens) - 1] = 1
        hidden, logits, *_ = self.model._backbone_forward(
            padded, ids, loss_mask, torch.zeros(*ids.shape, self.model.fc.out_features),
            torch.zeros_like(ids), max_anchors=1,
        )  # fmt: skip
        num_levels = size - self.first_slot
        return best_paths(
            lambda path: self._after(tokens, path, hidden, logits), self.ids, plan, num_levels
        )

    def _after(self, tokens, path, hidden, logits):
        model = self.model
        slot = self.first_slot + len(path)
        if hasattr(model, "refiner_head"):
            before = [*tokens[-1 - self.first_slot :], *path]
        else:
            before = [*tokens[-1:] * (1 + self.first_slot), *path]
        before = torch.tensor([before + [0] * (model.block_size - len(before))])
        if hasattr(model, "refiner_head"):
            return (logits + model.refiner_head.block_bias(before, hidden))[0, slot], 1.0
        if hasattr(model, "candidate_selector"):
            candidates, scores = model.candidate_selector.select(logits, hidden, before)
            spread = torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)
            return spread[0, slot], 1.0
        embeds = model.markov_head.prev_embeddings(before)
        features = torch.cat((hidden, embeds), -1)[..., : model.confidence_head.proj.in_features]
        confidence = model.confidence_head(features).sigmoid()[0, slot]
        bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
        return (logits + bias)[0, slot], float(confidence)


def library_section(target, folder):
    """Return the config's section that names the target, which is saved in the folder."""
    target.save_pretrained(folder / "target")
    verifier = {"name_or_path": str(folder / "target"), "architectures": ["LlamaForCausalLM"]}
    methods = {"proposal_methods": [PROPOSALS], "default_proposal_method": "greedy"}
    return {"algorithm": "any", "verifier": verifier} | methods


def assert_same_trees(drafter, target, inputs, model, monkeypatch):
    greedy: dict[str, Any] = dict(do_sample=False, max_new_tokens=12)
    checks = Checks(target, Library(model).expected, texts_of(target, inputs, **greedy))
    ours = SLOSpecGenerator(target, drafter=drafter, config=DRAFTS_ALWAYS)
    with checks.on(monkeypatch):
        assert_same_as_stock(target, ours.generate, inputs, **greedy)
    assert checks.num_checked > 3 and not checks.num_unready


@pytest.mark.parametrize("name", BLOCKS)
def test_trees_are_those_of_the_library(name, loaded, tmp_path, monkeypatch):
    target = target_of("llama")
    copies = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
    tensors = {each: tensor for each, tensor in CASES[name].tensors.items() if each not in copies}
    if "d2t" not in tensors:
        tensors.pop("lm_head.weight", None)
    config = {"sample_from_anchor": False} | CASES[name].config
    config["speculators_config"] = library_section(target, tmp_path)
    # The library counts windows from the anchor, others from each token: here all is within.
    config["transformer_layer_config"] = config["transformer_layer_config"] | WIDE
    folder = write(tmp_path / "head", config, tensors)
    drafter = load_drafter(folder, target)
    assert_same_trees(drafter, target, ragged_prompts(2), loaded(folder), monkeypatch)


def assert_same_logits(folder, target, tokens, model):
    head: Any = load_head(folder, target)
    features = features_of(target, tokens, head.feature_layers)
    ids = torch.tensor([tokens[1:]])
    positions = torch.arange(1, len(tokens))[None]
    logits = []
    model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output))
    with torch.no_grad():
        model(features[None], ids, torch.zeros_like(ids), ttt_steps=1)
        inputs = torch.cat((head.embed_tokens(ids), head.combine(features)[None]), dim=-1)
        ours = head(inputs_embeds=inputs, position_ids=positions).logits
    draft_vocab = head.draft_vocab_size
    torch.testing.assert_close(ours[..., :draft_vocab], logits[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(model.d2t + torch.arange(draft_vocab), head.target_ids)


def test_eagle_3_1_is_that_of_the_library(loaded, tmp_path):
    target = target_of("llama")
    flags = ("fc_norm", "norm_output")
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in eagle3_tensors(flags).items()
    }
    tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach()
    config = speculators_config(
        **dict.fromkeys(flags, True), eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        speculators_config=library_section(target, tmp_path),
    )  # fmt: skip
    folder = write(tmp_path / "head", config, tensors)
    assert_same_logits(folder, target, list(range(3, 30)), loaded(folder))


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_the_library_loads_what_train_drafter_writes(kind, loaded, tmp_path, monkeypatch):
    target, _, tokenizer = load_tiny_pair()
    embeddings = kind == "eagle3"  # the library replaces those of block heads by the target's
    options = TrainingOptions(kind=kind, draft_vocab=256, out=tmp_path, embeddings=embeddings)
    (tmp_path / "training").mkdir()
    counts = torch.arange(target.config.vocab_size).flip(0)
    write_head(new_head(options, target, counts), target, options)
    model = loaded(tmp_path)
    inputs = tokenizer(tiny_prompts()[0][-80:], return_tensors="pt")
    if kind == "dspark":
        assert_same_trees(load_drafter(str(tmp_path), target), target, inputs, model, monkeypatch)
    else:
        assert_same_logits(str(tmp_path), target, inputs["input_ids"][0].tolist(), model)
