"""Model families by class, as the support matrix tests them, and the families that must be refused."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import transformers

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, UnsupportedModelError
from scripts import support_matrix
from scripts.support_matrix import DifferentError, model_types, verdict_on
from tests.support.breadth import nightly_but, quick_or
from tests.support.model_classes import EXACT, SUPPORT, support_counts
from tests.support.paths import ROOT
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_models import FAMILIES, ragged_prompts, tiny_model

REFUSED = {
    "RwkvForCausalLM": "keeps states in a way of its own",
    "RecurrentGemmaForCausalLM": "1 of 3 layers cache keys",
    "ZayaForCausalLM": "no known function updates",
    "CpmAntForCausalLM": "masks of its own",
    "OpenAIGPTLMHeadModel": "0 of its layers",
    "LEDForConditionalGeneration": "its forward failed",
    "M2M100ForConditionalGeneration": "on a trial tree its logits differed",
    "MiniMaxM3VLForCausalLM": "minimax_m3_sparse",
    "MoshiForCausalLM": "cannot be packed",
    "ProphetNetForCausalLM": "its forward failed",
}


@pytest.mark.parametrize("family", nightly_but(("Olmo3", "Cohere2", "DeepseekV3", "Gemma4"), EXACT))
def test_exact(family, monkeypatch):
    monkeypatch.setattr(
        support_matrix, "SLOSpecConfig", functools.partial(SLOSpecConfig, max_depth=4)
    )  # half the time
    # Prompts are longer than windows already.
    monkeypatch.setitem(support_matrix.OPTIONS, "max_new_tokens", quick_or(12, 18))
    verdict = verdict_on(f"{family}ForCausalLM")
    assert (verdict.status, verdict.notes) == ("exact", [])
    assert verdict.drafters[:3] == ["assistant", "lookup", "suffix"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_before_any_work(name):
    model_class = getattr(transformers, name)
    model = model_class(tiny_config(model_class.config_class)).eval()
    before = dict(model.__dict__), model.config.to_dict()
    with pytest.raises(UnsupportedModelError, match=rf"^{name} .*{REFUSED[name]}"):
        SLOSpecGenerator(model)
    assert (dict(model.__dict__), model.config.to_dict()) == before


def test_encoders_are_told_how_to_become_decoders():
    config = tiny_config(transformers.BertConfig)
    config.is_decoder = False
    with pytest.raises(UnsupportedModelError, match=r"is_decoder=True"):
        SLOSpecGenerator(transformers.BertLMHeadModel(config).eval())


def test_support_page_names_every_class_and_nothing_is_wrong():
    causal, _, image_text = SUPPORT.read_text(encoding="utf-8").partition(
        "\n## Image-text models\n"
    )
    rows = _rows(causal)
    assert rows.keys() == model_types("causal-LM").keys()
    assert set(rows.values()) <= {"exact", "refused", "untested"}
    tested = {f"{family}ForCausalLM" for family in EXACT}
    tested |= {
        transformers.AutoModelForCausalLM._model_mapping[_config(family)].__name__
        for family in FAMILIES
    }
    assert {rows[name] for name in tested} == {"exact"}
    assert {rows[name] for name in REFUSED if name in rows} == {"refused"}
    if not image_text:
        pytest.skip("the page was written before image-text classes were tested")
    others = model_types("image-text").keys() - model_types("causal-LM").keys()
    assert _rows(image_text).keys() == others
    assert "**wrong**" not in causal + image_text


def test_counts_in_texts_are_those_of_the_support_page():
    """The README tells causal LMs by status; other pages tell how many classes of a kind there are."""
    columns = support_counts()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(
        r"the (\d+) causal-LM classes.*?(\d+) exact,\s+(\d+) refused.*?(\d+) untested",
        readme,
        re.DOTALL,
    )
    assert found is not None
    statuses = columns["causal-LM"]
    assert [*map(int, found.groups())] == [
        statuses[name] for name in ("all", "exact", "refused", "untested")
    ]
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        for number, kind in re.findall(r"(\d+)\s+(causal-LM|image-text)\s+classes", text):
            assert int(number) == columns[kind]["all"], path


def test_a_drafter_that_changes_the_output_is_wrong(monkeypatch):
    plain = support_matrix.generated

    def generated(generate, rows, **options):
        new = plain(generate, rows, **options)
        is_lookup = getattr(getattr(generate, "__self__", None), "decoder", None) is not None
        return [[*new[0][:3], new[0][3] ^ 1, *new[0][4:]]] if is_lookup else new

    monkeypatch.setattr(support_matrix, "generated", generated)
    with pytest.raises(
        DifferentError, match="drafter lookup, greedy: row 0 differs from stock at new token 3"
    ):
        support_matrix.working_drafters(
            "LlamaForCausalLM", tiny_model("llama"), torch.arange(3, 15)[None]
        )


def test_prompts_with_images_are_compared_with_stock(monkeypatch):
    """The comparison itself, on inputs without images; those of image-text classes are made
    elsewhere.
    """
    pictured = tiny_model("llama"), ragged_prompts(2)
    assert support_matrix.verdict_on_images(pictured) == ("exact", [])
    assert support_matrix.verdict_on_images("no such class") == (
        "untested",
        ["images: no such class"],
    )
    plain = SLOSpecGenerator.generate

    def wrong(self, *arguments, **options):
        output = plain(self, *arguments, **options)
        output.sequences[1, -2] ^= 1
        return output

    monkeypatch.setattr(SLOSpecGenerator, "generate", wrong)
    status, (note,) = support_matrix.verdict_on_images(pictured)
    place = support_matrix.NEW_TOKENS - 2
    assert (
        status,
        note.startswith(f"images, greedy: row 1 differs from stock at new token {place} "),
    ) == (
        "wrong",
        True,
    )


def test_placeholders_of_images_are_no_text():
    config = transformers.LlavaConfig(image_token_index=7)
    (row,) = support_matrix.without_placeholders([torch.tensor([[5, 7, 8]])], config)
    assert row.tolist() == [[5, 3, 8]]


def _rows(text):
    """Return the status of every class in the tables of a support page."""
    return dict(re.findall(r"^\| (\w*[A-Z]\w*) \| [^|]+ \| (\S+) \|", text, re.MULTILINE))


def _config(family):
    return getattr(transformers, FAMILIES[family][0])
