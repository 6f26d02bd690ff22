"""What ``hf_slospec.status`` returns, and how results print in terminals and notebooks."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys

import pytest
import torch

import hf_slospec
from hf_slospec.request.tables import PrintsAsTable
from tests.support.paths import ROOT
from tests.support.toys.tiny_models import ragged_prompts, tiny_model

OPTIONS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def fresh():
    return copy.deepcopy(tiny_model("llama"))  # a test changes its forward


def test_a_model_that_is_not_enabled(fresh):
    status = hf_slospec.status(fresh)
    assert status.enabled.startswith("no; call hf_slospec.enable(model)")
    assert status.done is None
    assert str(status).splitlines()[0].startswith("model    LlamaForCausalLM, 0 M parameters")


def test_counts_of_calls_and_settings(fresh):
    config = hf_slospec.SLOSpecConfig(policy="fixed", max_depth=3, max_width=1, compile=False)
    hf_slospec.enable(fresh, config=config)
    out = fresh.generate(
        **ragged_prompts(3), **OPTIONS, slo_tpot=[9.0, None, 1e-6], return_dict_in_generate=True
    )
    status = hf_slospec.status(fresh)
    assert (status.drafter, status.policy) == ("prompt lookup", "fixed")
    assert status.enabled == "calls of generate with slo_tpot"
    assert status.forwards.keys() == {"target"}
    assert status.done.rows == 3
    assert status.done.tokens == sum(metrics.tokens - 1 for metrics in out.slo)
    assert status.done.accepted == sum(metrics.accepted for metrics in out.slo)
    assert "3 rows, " in str(status)
    hf_slospec.disable(fresh)
    assert hf_slospec.status(fresh).done is None


def test_what_is_said_of_exactness(fresh):
    for dtype, words in ((torch.float32, "equal"), (torch.bfloat16, "near-ties of bfloat16")):
        model = hf_slospec.enable(fresh.to(dtype), config=hf_slospec.SLOSpecConfig(compile=False))
        assert words in hf_slospec.status(model).exactness
    hf_slospec.enable(fresh, config=hf_slospec.SLOSpecConfig(exact="bits"))
    assert "bit for bit" in hf_slospec.status(fresh).exactness


def test_a_model_whose_calls_run_stock_generate(fresh):
    fresh.model.layers[0].mlp.forward = lambda x: x + x.mean(1, keepdim=True)
    hf_slospec.enable(fresh, fallback=True)
    assert hf_slospec.status(fresh).enabled.startswith("stock generate runs: ")


def test_one_line_is_logged_by_enable(fresh, caplog):
    with caplog.at_level(logging.INFO, "hf_slospec"):
        hf_slospec.enable(fresh, "lookup", always=True)
    (record,) = caplog.records
    assert record.message.startswith("speculating all calls of generate: LlamaForCausalLM (0 M")
    assert record.message.endswith("drafts: prompt lookup")


def test_metrics_print_as_a_table(fresh):
    hf_slospec.enable(fresh)
    out = fresh.generate(
        **ragged_prompts(2),
        **OPTIONS | {"max_new_tokens": 1},
        slo_tpot=[0.05, None],
        return_dict_in_generate=True,
    )
    header, first, second = str(out.slo).splitlines()
    assert header.split()[:2] == ["row", "tokens"]
    assert first.split()[:4] == ["0", "1", "50.0", "-"]  # no time per token of one token
    assert second.split()[:4] == ["1", "1", "-", "-"]
    assert str(out).splitlines()[1:] == str(out.slo).splitlines()
    assert str(out.slo[0]).splitlines()[1].split()[:2] == ["0", "1"]
    assert repr(out.slo[:1]).startswith("[<RequestMetrics: tokens 1, SLO ms/token 50.0, first ")
    assert "-" not in repr(out.slo[1])
    for shown in (out, out.slo, out.slo[1], hf_slospec.status(fresh)):
        assert shown._repr_html_().startswith("<table><tr><th>")


def test_handles_results_and_generators_print_in_short(fresh):
    gen = hf_slospec.SLOSpecGenerator(fresh, config=hf_slospec.SLOSpecConfig(compile=False))
    with gen:
        handle = gen.submit([1, 2, 3], **OPTIONS)
        result = handle.result()
        assert hf_slospec.status(gen).policy == "auto"
        gen.set_policy("none")
        assert hf_slospec.status(gen).policy == "auto; none for submitted requests"
    assert repr(handle) == "<RequestHandle 0: length, 12 new tokens>"
    assert repr(result) == "<RequestResult: 12 tokens, finish_reason 'length'>"
    assert str(result) == f"{result!r}\n{result.metrics}"
    assert "<table>" in result._repr_html_() and "<table>" in handle._repr_html_()
    assert repr(gen).splitlines()[1].startswith("model ")
    assert hf_slospec.status(gen).done == hf_slospec.status(gen).done._replace(rows=1, tokens=11)


def test_a_closed_generator_and_a_copy_of_an_enabled_model(fresh):
    config = hf_slospec.SLOSpecConfig(compile=False)
    gen = hf_slospec.SLOSpecGenerator(hf_slospec.enable(fresh, config=config), config=config)
    gen.close()
    assert hf_slospec.status(gen).enabled == "no; the generator was closed"
    with pytest.raises(hf_slospec.NotRunningError, match="closed"):
        gen.set_policy("none")
    assert hf_slospec.status(copy.deepcopy(fresh)).enabled.startswith("no; ")
    assert hf_slospec.status(fresh).enabled == "calls of generate with slo_tpot"


class Cells(PrintsAsTable):
    def _table(self):
        return [("a", "<bb"), ("ccc", "d")]


def test_tables():
    cells = Cells()
    assert repr(cells) == "  a  <bb\nccc    d"
    first = "<table><tr><th>a</th><th>&lt;bb</th></tr>"
    assert cells._repr_html_() == f"{first}<tr><td>ccc</td><td>d</td></tr></table>"
    cells._has_header = False
    assert repr(cells) == "a    <bb\nccc  d"
    assert cells._repr_html_().count("<th>") == 2


WARNING = """
import logging, sys, hf_slospec
for name in sys.argv[1:]:
    logging.getLogger(name).addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("hf_slospec.policies.auto").warning("an SLO")
"""


def test_warnings_name_their_logger_unless_the_application_logs():
    def printed(*arguments):
        command = [sys.executable, "-c", WARNING, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        return result.stdout, result.stderr

    assert printed()[1].endswith("hf_slospec.policies.auto: an SLO\n")
    assert printed("root") == ("an SLO\n", "")
    assert printed("hf_slospec.policies") == ("an SLO\n", "")
