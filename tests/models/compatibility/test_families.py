"""Model families by class, as the support matrix tests them, and the families that must be refused."""

from __future__ import annotations

import functools
import re

import pytest
import transformers

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, UnsupportedModelError
from scripts import support_matrix
from scripts.support_matrix import model_types, verdict_on
from tests.support.model_classes import EXACT, SUPPORT
from tests.support.tiny_configs import tiny_config
from tests.support.tiny_models import FAMILIES

REFUSED = {
    "MambaForCausalLM": "recurrent",
    "RwkvForCausalLM": "recurrent",
    "JambaForCausalLM": "recurrent",
    "FalconH1ForCausalLM": "recurrent",
    "BloomForCausalLM": "attention interface",
    "FalconForCausalLM": "attention interface",
    "T5ForConditionalGeneration": "encoder-decoder",
    "WhisperForCausalLM": "attention interface",
    "WhisperForConditionalGeneration": "encoder-decoder",
    "Llama4ForCausalLM": "chunked_attention",
    "DiffLlamaForCausalLM": "cannot be packed",
    "DogeForCausalLM": "attention mask",
}


@pytest.mark.parametrize("family", EXACT)
def test_exact(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support_matrix, "SLOSpecConfig", functools.partial(SLOSpecConfig, max_depth=4))  # half the time
    monkeypatch.setitem(support_matrix.OPTIONS, "max_new_tokens", 18)  # prompts are longer than windows already
    verdict = verdict_on(f"{family}ForCausalLM")
    assert (verdict.status, verdict.notes) == ("exact", [])


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_before_any_work(name: str) -> None:
    model_class = getattr(transformers, name)
    model = model_class(tiny_config(model_class.config_class)).eval()
    before = dict(model.__dict__), model.config.to_dict()
    with pytest.raises(UnsupportedModelError, match=rf"^{name} .*{REFUSED[name]}"):
        SLOSpecGenerator(model)
    assert (dict(model.__dict__), model.config.to_dict()) == before


def test_encoders_are_told_how_to_become_decoders() -> None:
    config = tiny_config(transformers.BertConfig)
    config.is_decoder = False
    with pytest.raises(UnsupportedModelError, match=r"is_decoder=True"):
        SLOSpecGenerator(transformers.BertLMHeadModel(config).eval())


def test_support_page_names_every_class_and_nothing_is_wrong() -> None:
    rows = dict(re.findall(r"^\| (\w+) \| [^|]+ \| (\S+) \|", SUPPORT.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows.keys() - {"class"} == model_types().keys()
    assert set(rows.values()) <= {"exact", "refused", "untested", "status"}
    tested = {f"{family}ForCausalLM" for family in EXACT}
    tested |= {transformers.AutoModelForCausalLM._model_mapping[_config(family)].__name__ for family in FAMILIES}
    assert {rows[name] for name in tested} == {"exact"}
    assert {rows[name] for name in REFUSED if name in rows} == {"refused"}


def _config(family: str) -> type:
    return getattr(transformers, FAMILIES[family][0])
