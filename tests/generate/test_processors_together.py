"""Logits processors that read no tokens are called once for the nodes of all rows, and compute what
calls for each row compute, bit for bit.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as stock

from hf_slospec.generate.processors import (
    BY_LENGTH,
    IGNORE_SEQUENCE,
    MASKING,
    processors_of_rows,
    reads_of_length,
)
from hf_slospec.model import sampling
from hf_slospec.model.record import Record
from hf_slospec.model.sampling import StockSampler
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import TokenTree
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model

VOCAB = 101
PROMPT_LEN = 5  # padding included
CPU = torch.device("cpu")
# Options of generate that lead to all processors of BY_LENGTH and most of IGNORE_SEQUENCE.
OPTIONS = dict(
    min_length=7,
    min_new_tokens=4,
    begin_suppress_tokens=[3, 9],
    forced_eos_token_id=2,
    exponential_decay_length_penalty=(3, 1.1),
    suppress_tokens=[11],
)
SAMPLED = dict(
    do_sample=True,
    temperature=0.8,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    typical_p=0.9,
    epsilon_cutoff=1e-4,
    eta_cutoff=1e-4,
    renormalize_logits=True,
)
MADE = [
    stock.MinLengthLogitsProcessor(7, 2),
    stock.MinNewTokensLengthLogitsProcessor(PROMPT_LEN, 3, [2, 4]),
    stock.SuppressTokensAtBeginLogitsProcessor([3, 9], PROMPT_LEN + 1),
    stock.ForcedBOSTokenLogitsProcessor(1),
    stock.ForcedEOSTokenLogitsProcessor(PROMPT_LEN + 4, 2),
    stock.ExponentialDecayLengthPenalty((2, 1.1), 2, PROMPT_LEN),
]


@pytest.mark.parametrize("processor", MADE, ids=lambda made: type(made).__name__)
def test_equal_reads_of_length_mean_equal_scores(processor):
    assert {type(made) for made in MADE} == set(BY_LENGTH)
    read = reads_of_length([processor])
    scores = torch.randn(1, VOCAB)
    ((ours,),) = processors_of_rows([processor], 1)
    found = {}
    for length in range(1, 13):
        input_ids = torch.randint(3, VOCAB, (1, length))
        out = processor(input_ids, scores.clone())
        assert torch.equal(found.setdefault(read(length), out), out)
        assert torch.equal(ours(input_ids, scores), out)
        assert torch.equal(ours(input_ids, scores[:, 1:]), processor(input_ids, scores[:, 1:]))
    assert len(found) > 1


def scores_of(processors, reads, requests, logits, trees):
    config = GenerationConfig(output_scores=True, return_dict_in_generate=True)
    record = Record(3, config)
    prompts = [[0] * PROMPT_LEN] * 3
    made = StockSampler([processors] * 3, False, prompts, CPU, reads, record)
    read, choosers = made.choose(requests, logits, trees)
    tokens = []
    for request, tree, choose in zip(requests, trees, choosers(read.tolist()), strict=True):
        committed = list(request.tokens)
        for node in range(tree.num_nodes):
            tokens.append(choose(node))
            request.tokens.append(0)  # so far the path to the next node of a chain
        request.tokens[:] = committed
    return tokens, record._rows["scores"]


def test_choices_together_have_the_bits_of_choices_by_path(monkeypatch):
    calls = []
    isin = torch.isin
    monkeypatch.setattr(torch, "isin", lambda *args, **kw: calls.append(1) or isin(*args, **kw))
    requests = []
    for row, num_new in enumerate((0, 1, 3)):
        requests.append(Request(row, RequestParams([5] * (PROMPT_LEN - row), 9, row=row)))
        requests[-1].tokens += [7] * num_new
    chain = TokenTree(*(np.array(each) for each in ([5, 6], [-1, 0], [0, 1], [1.0, 0.5])))
    logits = torch.randn(6, VOCAB)
    processors = [*MADE, stock.TopPLogitsWarper(0.9), stock.LogitNormalization()]
    reads = reads_of_length(processors)
    expected = scores_of(processors, None, requests, logits, [chain] * 3)
    calls.clear()
    (ours,) = processors_of_rows(processors, 1)
    for read in (reads, None):
        tokens, rows = scores_of(ours, read, requests, logits, [chain] * 3)
        assert tokens == expected[0]
        for row, by_stock in zip(rows, expected[1], strict=True):
            assert all(map(torch.equal, row, by_stock))
    assert len(calls) == sum(type(each) in MASKING for each in MADE)  # once, not once per node

    calls.clear()
    few = [lambda *args: calls.append(1) or MADE[0](*args)]
    read = reads_of_length(MADE[:1])  # a minimum that both nodes have yet to reach
    scores_of(few, read, requests[:1], logits[:2], [chain])
    assert calls == [1, 1]  # and isin in it


def test_subclasses_are_called_for_each_row():
    class Mine(stock.MinNewTokensLengthLogitsProcessor):
        pass

    assert reads_of_length([Mine(5, 3, 2)]) is None
    assert reads_of_length([*MADE, stock.RepetitionPenaltyLogitsProcessor(1.1)]) is None
    assert {stock.TopKLogitsWarper, stock.TemperatureLogitsWarper} <= IGNORE_SEQUENCE


@pytest.mark.parametrize("options", [OPTIONS, OPTIONS | SAMPLED], ids=["greedy", "sampled"])
def test_calls_equal_stock(options, monkeypatch):
    from hf_slospec import SLOSpecConfig, SLOSpecGenerator

    counts = SimpleNamespace(apart=0)
    by_path = StockSampler._choose_by_path

    def counted(self, *args):
        counts.apart += 1
        return by_path(self, *args)

    monkeypatch.setattr(sampling.StockSampler, "_choose_by_path", counted)
    model = tiny_model("llama")
    config = SLOSpecConfig(policy="fixed", max_depth=3, max_width=2, compile=False)
    generator = SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=config)
    assert_same_as_stock(
        model,
        generator.generate,
        ragged_prompts(4),
        max_new_tokens=20,
        **{"do_sample": False} | options,
    )
    assert not counts.apart
