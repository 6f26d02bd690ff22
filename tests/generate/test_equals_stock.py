"""Speculation equals stock ``generate``: models, inputs, forward paths, drafters, options, entry
points.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import DynamicCache, StaticCache

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.model.properties import CACHE_NAME, cache_option
from tests.cuda.conftest import device, tapes  # noqa: F401  fixtures
from tests.support.breadth import nightly_but, nightly_rows_but
from tests.support.served_pair import WAIT_S, answer
from tests.support.stock_matrix import (
    ALWAYS,
    PUBLISHED_HEADS,
    check_equals_stock,
    config_of,
    model_of,
    padded,
    random_texts,
)
from tests.support.toys.tiny_models import assert_same_cache, ragged_prompts, tiny_copy, tiny_model

# Model, inputs, path, drafter, options, entry point. Alternatives have | between them, and all are
# combined.
QUICK = """
llama  3  eager  fair  sampled  generator
mistral-window       8      eager          fair                   sampled               per-row
gpt2  1  eager  useless  greedy  generator
gemma3               3      4d-mask        fair                   sampled               enable
gemma2               8      eager          lookup                 greedy+scores         always
gpt-oss              3      chain          fair                   sampled               generator
qwen3                3      roots          lookup                 sampled+top-p         enable
mistral-window       3      wide           fair                   greedy                submit
llama                145,150  eager        gpt2                   greedy                generator
embedded  code  auto  fair  sampled  generator
embedded             long   auto           fair                   sampled               generator
embedded             code   auto           fair                   greedy+stop-strings   submit
embedded             code   chain          suffix+trained         sampled               generator

llama                3      eager          fair                   drawn+cold            generator
llama                3      eager          fair                   drawn+warm            enable
llama                3      node-by-node   fair                   drawn+top-p           generator
llama                3      no-noise       fair                   drawn+min-p           generator
llama                3      little-noise   perfect                drawn                 per-row
llama                3      eager          fair                   drawn+typical         submit
llama                3      uncoupled      fair                   drawn+epsilon         generator
llama  3  eager  llama-narrow  drawn+eta+all-suppressed  generator
llama  3  eager  llama-narrow  drawn+top-h+all-suppressed  generator
llama  3  chunks  fair  drawn+renormalized+no-invalid  generator
qwen2  3  eager  fair  drawn+repetition+ngrams+min-new+warm  generator
llama                3      chunks         fair                   greedy+repetition     generator
llama  3  eager  fair  sampled+encoder-repetition  generator
llama  3  eager  fair  sampled+bad-words  submit
llama  3  eager  fair  sampled+min-length|greedy+min-new  generator
llama  3  eager  fair  sampled+forced-bos|greedy+forced-eos  enable
llama  3  eager  fair  sampled+suppressed+begin-suppressed  submit
llama  3  eager  fair  sampled+biased|greedy+decaying  generator
llama  3  eager  fair  sampled+guided|greedy+negative  generator
llama                3      eager          fair                   sampled+prefix        enable
llama  3  eager  fair  sampled+watermark|sampled+synthid  enable
llama  1  eager  fair  sampled+drawing  generator
llama  3  eager  fair  sampled+countdown|greedy+row-bias  generator
llama  3  eager  fair  sampled+widened|sampled+countdown-per-row  generator
llama  3  eager  fair  greedy+narrowing  generator
llama                1      eager          fair                   greedy+narrowing+in-place  submit

llama  8  eager  fair  sampled+stop-at+eos+streamed  generator
llama                3      eager          fair                   drawn+any-row+no-eos  generator
llama  1  eager  fair  drawn+any-row  generator
llama  3  eager  fair  greedy+sure|drawn+max-calls  enable
llama  1  eager  fair  drawn+plain-bool|greedy+replacing+streamed  enable
llama  3  eager  perfect  drawn+lm-eval+streamed  generator
llama  3  eager  fair  greedy+lm-eval-late+eos  generator
llama  1  eager  fair  greedy+many-tokens+streamed  enable
llama  8  eager  fair  sampled+no-pad  generator
mistral-window       3      growing        fair                   sampled+eos           generator
llama                3      eager          fair                   drawn+endless         enable
llama  3  eager  fair  greedy+max-length|greedy+one-token  enable
llama  3  eager  lookup  greedy+no-dict|greedy+last-logits  generator
llama  3  eager  lookup  greedy+prefill-chunks|greedy+no-cache  generator
llama                3      eager          fair                   config                enable
llama                repetitive  eager     lookup-argument        greedy                per-call

llama  embeds  eager  fair  sampled  generator
llama                embeds+ids  eager     fair                   greedy                generator
llama                embeds      eager     suffix                 drawn+sequences       enable
gpt2  gap  eager  fair  greedy  generator
bert|roberta         types       eager     lookup                 greedy|drawn+sequences  always
llama                positions   eager     fair                   greedy                generator
llama                nothing     eager     fair                   greedy                generator
llama                repetitive  eager     lookup|suffix          sampled               generator
llama                repetitive  auto      lookup+suffix|lookup+fair  greedy            submit
qwen2                repetitive  eager     lookup                 greedy                enable
llama  3  eager  lookup+fair  sampled  custom_generate
llama  3  eager  fair  greedy  custom_generate

llama  3  compiled  fair  greedy+no-dict|sampled+no-dict  generator
llama                3      compiled       lookup                 greedy                submit
llama                3      prepacked      fair                   sampled               generator
gpt2  3  prepacked  fair  greedy  submit
llama-bf16           4      exact-bits     fair                   greedy                preempted
llama                3      uncaptured     fair                   greedy                generator
llama-deep           3      captured       eagle3|dflash          sampled               generator
llama  3  cuda  fair  greedy+repetition+scores  generator
gemma3               3      cuda           fair                   greedy                per-row
mixtral  3  default-device  lookup  sampled+repetition  generator
llama                3      device-context perfect                greedy                submit

llama-deep           1      eager          eagle3                 greedy+two-tokens     generator
llama-deep           token  eager          mtp|dflash             drawn+sequences       generator
llama-deep  embeds  eager  eagle3  sampled  generator
llama-deep           3      eager          deepspec|dflash2       greedy                generator
llama-deep           3      eager          domino|jetspec         sampled               generator
llama-tokens         foreign  eager        other-tokens           greedy|sampled        generator
llama-tokens  foreign  eager  other-tokens  greedy  per-call|always
llama-tokens         foreign  eager        other-tokens           greedy                submit
llama                3      eager          llama-128|llama-narrow sampled               generator
llama-128            large-ids  eager      llama                  greedy+bad-words      generator
llama-128            3      eager          llama                  greedy+no-eos+min-new generator
llama-few-outputs    unwritable  eager     lookup                 drawn                 generator
llama  3  eager  llama-bf16|llama-fp64|llama-int8-activations  sampled  generator
llama                3      eager          llama-training|llama-lora|llama-hook  greedy  submit
gpt2                 3      eager          gpt2-training          sampled               generator
llama-tied|llama-fp64|llama-int8  3  eager fair                   sampled               generator
llama-training|llama-int4|llama-fp8  3  eager  fair               greedy                enable
llama-lora|llama-hook  3    eager          fair                   greedy                generator
gpt2-offloaded       3      eager          fair                   sampled               generator

DeepseekV32ForCausalLM  3  eager  fair  sampled  generator
MptForCausalLM|GPTJForCausalLM  3  eager   fair                   sampled               submit
BartForCausalLM|BioGptForCausalLM  3  eager  fair                 sampled               generator
llama4-chunks|phimoe-window  3  eager      fair                   sampled               generator
llama4-temperatures  3      eager          fair                   greedy                generator
llama-dynamic-rope  10,12,14|40,50,33  eager  fair  drawn  generator
llama-longrope  12,50,26  eager  fair  greedy  submit
llama-dynamic-rope  20,26,31  eager  fair  greedy  submit
llama-dynamic-rope  12,50,26  eager  fair  greedy  submit
llama-longrope       50,20|32,31,33  chunks  lookup               greedy                generator
phi3-longrope  10,12,14  eager  fair  greedy  generator
FalconH1ForCausalLM  3      eager          fair                   greedy                submit
Mamba2ForCausalLM    repetitive  eager     lookup                 greedy                submit
JambaForCausalLM     equal-rows  eager     fair                   sampled               generator

Qwen2_5_VLForConditionalGeneration   images       eager  fair     sampled               generator
Qwen3VLForConditionalGeneration      images       eager  fair     greedy                generator
Gemma3ForConditionalGeneration       some-images  eager  lookup   sampled               generator
Gemma4ForConditionalGeneration       images       eager  fair     sampled               enable
LlavaForConditionalGeneration        images       eager  llama    greedy                generator
Idefics3ForConditionalGeneration     some-images  eager  fair     sampled               generator
Qwen3_5ForConditionalGeneration      images       eager  fair     sampled               generator
Qwen2VLForConditionalGeneration  images  eager  lookup  drawn+sequences|greedy+repetition  generator
Qwen2VLForConditionalGeneration  images  eager  lookup  greedy+static-cache  generator
Qwen2VLForConditionalGeneration  images  eager  lookup  greedy+no-cache+no-placeholders  generator
PaliGemmaForConditionalGeneration    images       eager  fair     sampled               generator

Bart  3  eager  lookup  sampled  generator
T5  3  eager  Bart  greedy+sequences+drawn+repetition  generator
T5                   begun|encoded|inputs  eager  fair            greedy                generator
Bart  2  eager  fair  greedy+encoder-repetition+encoder-ngrams  enable
T5  2  eager  fair  greedy+no-start  generator
Bart                 3      auto           llama|lookup-argument  greedy                per-call
Whisper  3  eager  fair  warmer|greedy+timestamps  generator
Whisper              2      eager          whisper-bf16           greedy                generator

embedded  code4  auto  fair  sampled  preempted
embedded  code4  auto  trained  greedy  preempted
llama                4      captured       fair                   greedy                preempted
llama-longrope       20,31,33,60  eager    fair                   greedy                preempted
Qwen3_5ForCausalLM   4      eager          Lfm2ForCausalLM        greedy                preempted
embedded             code   auto           fair                   greedy                conversation
llama                3      chain          perfect                sampled               conversation
gemma4               3      eager          fair                   greedy                conversation
Lfm2ForCausalLM      3      eager          fair                   greedy                conversation
embedded             code   auto           fair                   greedy                threads
llama                3      captured       fair                   greedy                threads
gpt2  3  growing  fair  greedy  threads
BloomForCausalLM     3      eager          fair                   greedy                threads
embedded             code   chain          trained                greedy                threads
llama                1      eager|captured fair                   sampled               interrupted
llama-deep           1      eager          eagle3                 greedy                interrupted
"""
# Rows with the same answers by other ways, and further models, inputs and options.
NIGHTLY = """
gemma4  3  eager  fair  sampled  generator
T5  2  eager  fair  greedy+no-cache  generator
gemma4  3  eager  fair  greedy  generator
llama  3  eager  useless  sampled  generator
mixtral  3  eager  fair  greedy  submit
llama  8  eager  fair  greedy+eos  generator
llama  3  captured  fair  sampled  generator
llama  3  eager  fair  greedy+encoder-ngrams  submit
llama  3  eager  perfect  sampled  generator
gpt2  3  captured  fair  sampled  generator
llama  1  eager  fair  greedy+countdown  generator
llama  embeds  eager  fair  greedy+max-length  generator
BloomForCausalLM  3  eager  fair  sampled  generator
llama-longrope  10,12,14  eager  fair  drawn  generator
llama  3  eager  fair  drawn+sequences  per-row
llama-longrope  40,50,33  eager  fair  drawn  generator
llama  1  eager  fair  greedy+max-calls  generator
llama  3  default-device  lookup  sampled+repetition  generator
llama-longrope  20,26,31  eager  fair  greedy  submit
llama  3  eager  fair  sampled+in-place  generator
gemma2  embeds  eager  fair  sampled  generator
llama  gap  eager  fair  greedy  generator
gpt2  1  eager  fair  greedy  generator
llama  3  eager  fair  greedy+static-cache+no-dict  generator
llama  equal-rows  eager  fair  sampled  generator
Bart  3  eager  fair  sampled  generator
llama  3  cuda  fair  sampled+sequences+min-new  generator
Whisper  3  eager  fair  drawn+cold  enable
llama  3  eager  fair  greedy+many-tokens+streamed  enable
llama-deep  3  eager  dflash  sampled  generator
gemma4  4  eager  fair  greedy  preempted
Whisper  3  eager  fair  greedy  generator
llama-deep  embeds  eager  dflash  sampled  generator
llama-deep  3  eager  mtp  sampled  generator
Qwen3_5ForCausalLM  3  eager  fair  drawn  generator
llama-deep  3  eager  eagle3  sampled  generator
embedded  code4  auto  trained  sampled  preempted
gemma3  3  captured  fair  sampled  generator
llama-tokens  foreign  eager  other-tokens  sampled  preempted
Qwen3_5ForCausalLM  3  eager  Lfm2ForCausalLM  sampled  submit
gpt-oss  3  captured  fair  sampled  generator
embedded  code4  auto  fair  greedy  preempted
llama-deep  4  eager  eagle3  greedy  preempted
mixtral  3  prepacked  fair  greedy  submit
Lfm2ForCausalLM  3  eager  fair  drawn  generator
T5  3  eager  fair  sampled  generator
Bart  3  default-device  lookup  greedy  generator
Whisper  3  eager  fair  greedy+min-new+repetition  enable
T5  3  eager  lookup  sampled  generator
embedded  code  eager  fair  sampled  generator
phi3-longrope  40,50,33  eager  fair  greedy  generator
gpt-oss  3  growing  fair  greedy  threads
llama-deep           3      compiled       eagle3                 sampled               generator
qwen2|qwen2-window|mistral|phi3|gpt-neox|opt  3  eager            fair     sampled      generator
llama|mistral-window|gpt2|gemma3  1|3|8  eager|4d-mask            fair     greedy       generator
mistral-window       3      roots|chain|wide|auto|sequoia         fair     greedy|sampled  generator
embedded             longer auto           fair                   greedy                generator
embedded             code   chain          trained                sampled               generator
llama|gemma3         3      compiled       fair                   greedy|sampled        submit
llama|mistral-window|gpt-oss|gemma3  3  prepacked|captured  fair  greedy                submit
llama|gpt2|gemma3|mixtral  3  cuda         fair|lookup            greedy|sampled        per-row
llama-bf16           1|3    exact-bits     lookup|fair            greedy|sampled        submit
llama  1|3  eager|chunks|growing|node-by-node  fair  greedy+repetition|sampled+stop-at+eos  per-row
llama  3  eager  fair  greedy+ngrams|sampled+min-length+repetition  submit
llama  3  eager  fair  greedy+stop-at|greedy+any-row|greedy+lm-eval  generator
electra|roformer|rembert  types  eager          lookup                 greedy|drawn          generator
llama-deep  3|1  eager  eagle3|mtp|dflash  greedy|sampled+repetition  per-row
llama-longrope|llama-dynamic-rope  10,12,14|20,26,31|40,50,33  eager  fair  greedy|drawn  generator
llama-longrope|llama-dynamic-rope  12,50,26|32,31,33  eager  fair  greedy|drawn  generator
llama-int8|llama-lora  1|3  eager          fair                   greedy                submit
Lfm2ForCausalLM|BambaForCausalLM|FalconH1ForCausalLM  3  eager  fair  greedy|drawn      submit
LlavaNextForConditionalGeneration  images  eager  fair  sampled  generator
LlavaOnevisionForConditionalGeneration  images  eager  fair  sampled  generator
Mistral3ForConditionalGeneration  images  eager  fair  sampled  generator
InternVLForConditionalGeneration  images  eager  fair  sampled  generator
SmolVLMForConditionalGeneration  images  eager  fair  sampled  generator
Qwen3_5MoeForConditionalGeneration  images  eager  fair  sampled  generator
MBart|Marian|Pegasus|MT5  3  eager         fair|lookup            greedy|sampled        generator
Whisper  3  eager  fair  language|languages|segments|previous  generator
Whisper              3      eager          lookup                 greedy|drawn+timestamps  generator
Whisper              3      eager          perfect                greedy                generator
embedded             code   sequoia        trained                greedy                generator
gemma4-own|gemma4-unified  1|3  eager      fair                   greedy|sampled        generator
llama|mistral-window|gpt2|gemma2  4  eager|4d-mask|prepacked  fair  sampled             preempted
Lfm2ForCausalLM|BambaForCausalLM  4  eager fair                   greedy                preempted
llama-longrope|llama-dynamic-rope  20,26,45,60  eager  fair       greedy                preempted
llama|gemma2         3      eager|compiled|prepacked  fair        greedy                threads
"""


def rows_of(table):
    """Return the rows of a table, one for each combination of its alternatives."""
    lines = [line.split() for line in table.splitlines() if line]
    return [
        " ".join(row)
        for line in lines
        for row in itertools.product(*(cell.split("|") for cell in line))
    ]


PUBLISHED = [f"llama-deep 3 eager {name} drawn generator" for name in PUBLISHED_HEADS]


@pytest.mark.filterwarnings(
    "ignore:.*decoded in step:hf_slospec.FallbackWarning",
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
)
@pytest.mark.parametrize(
    "row",
    nightly_but(rows_of(QUICK), dict.fromkeys(rows_of(QUICK) + rows_of(NIGHTLY) + PUBLISHED)),
    ids=lambda row: "-".join(row.split()),
)
def test_equals_stock(row, request):
    check_equals_stock(row, request)


# Model, prompt lengths, and how turns get their cache: passed to the first, or returned by the turn
# before.
TURNS = """
llama|gpt2|mistral-window|gemma3               12,20  passed|static
llama                                          14     returned
Gemma3nForCausalLM|Gemma4ForCausalLM           14     passed
DeepseekV32ForCausalLM                         14,14  passed
Lfm2ForCausalLM|Qwen3_5ForCausalLM             12,20  passed
Mamba2ForCausalLM|ZambaForCausalLM             9,9    returned
FalconH1ForCausalLM|BambaForCausalLM|FalconMambaForCausalLM|Qwen3NextForCausalLM  9,9  returned
"""
QUICK_TURNS = rows_of("""
llama|mistral-window                            12,20  passed
gemma3                                          12,20  static
llama                                           14     returned
Gemma4ForCausalLM                               14     passed
DeepseekV32ForCausalLM                          14,14  passed
Lfm2ForCausalLM                                 12,20  passed
Mamba2ForCausalLM|ZambaForCausalLM|Qwen3NextForCausalLM  9,9  returned
""")


@pytest.mark.parametrize(
    "row", nightly_but(QUICK_TURNS, rows_of(TURNS)), ids=lambda row: "-".join(row.split())
)
def test_turns_on_a_cache_equal_stock(row):
    """Whoever writes which turn. With returned caches, turns are those of one uninterrupted call."""
    name, lengths, kind = row.split()
    model = model_of(name)
    generator = SLOSpecGenerator(model, model_of(name, 0.03), config=SLOSpecConfig(**ALWAYS))
    calls = {"stock": type(model).generate.__get__(model), "ours": generator.generate}
    makes = {
        "passed": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(model.config, max_cache_len=96),
        "returned": lambda: None,
    }
    start = padded(random_texts(*map(int, lengths.split(","))))
    (parameter,) = cache_option(None, model)

    def conversation(*writers, num_new=8):
        (text, mask) = start.values()
        cache = makes[kind]()
        for turn, writer in enumerate(writers):
            given = {} if cache is None else {parameter: cache}
            out = calls[writer](
                text, attention_mask=mask, do_sample=False, eos_token_id=None, max_new_tokens=num_new,
                return_dict_in_generate=True, **given,
            )  # fmt: skip
            found = out[parameter] if parameter in out else out[CACHE_NAME]
            assert kind == "returned" or found is cache
            cache = found
            more = torch.full((len(text), 0 if kind == "returned" else 4), 7 + turn)
            text = torch.cat((out.sequences, more), 1)
            mask = torch.cat((mask, torch.ones(len(text), text.shape[1] - mask.shape[1]).long()), 1)
        return text, cache, mask

    if kind == "returned":
        expected, _, _ = conversation("stock", num_new=24)
        for writers in (("ours", "ours", "ours"), ("stock", "ours", "ours")):
            assert torch.equal(conversation(*writers)[0], expected)
        return
    expected, stocks_cache, mask = conversation("stock", "stock", "stock")
    for writers in (("ours", "ours", "ours"), ("stock", "ours", "stock")):
        text, cache, _ = conversation(*writers)
        assert torch.equal(text, expected)
        assert_same_cache(cache, stocks_cache, mask)


def fused_step(model):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    model(input_ids=torch.arange(3, 40)[None], labels=torch.arange(3, 40)[None]).loss.backward()
    optimizer.step()


def replaced_weight(model):
    model.model.layers[1].self_attn.q_proj.weight = torch.nn.Parameter(torch.randn(32, 32))


CHANGES = {
    "optimizer": fused_step,
    "written data": lambda model: model.model.layers[0].mlp.up_proj.weight.data.mul_(-1.0),
    "written detached": lambda model: model.model.layers[0].mlp.up_proj.weight.detach().mul_(-1.0),
    "replaced weight": replaced_weight,
    "hook": lambda model: model.model.layers[0].register_forward_hook(
        lambda module, inputs, out: out * -1.0
    ),
    "epsilon": lambda model: setattr(
        model.model.layers[0].input_layernorm, "variance_epsilon", 1.0
    ),
    "activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.Tanh()),
    "scaling": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.01),
    "what a hook reads": lambda model: model.model.layers[0].mlp.offset.fill_(3.0),
    "cast": lambda model: model.double(),
}


@pytest.mark.parametrize(
    ("path", "change"),
    nightly_rows_but(
        [("eager", change) for change in CHANGES],
        [
            (path, change)
            for path, change in itertools.product(
                ("eager", "compiled", "prepacked", "captured"), CHANGES
            )
            if (path, change) != ("captured", "cast")  # flash attention takes no fp64
        ],
    ),
)
def test_changes_of_the_model_are_seen(path, change, request):
    """By calls, and by requests that would reuse K/V of the model before."""
    model = tiny_copy("llama")
    mlp = model.model.layers[0].mlp
    mlp.offset = torch.tensor(0.0)  # neither a parameter nor a buffer
    if change == "what a hook reads":
        mlp.register_forward_hook(lambda module, inputs, out: out + module.offset)
    (text,) = random_texts(40)
    inputs = ragged_prompts(2)
    options = dict(do_sample=False, max_new_tokens=8)
    stock = type(model).generate.__get__(model)

    def check(is_reused):
        expected = answer(model, text, **options)
        handle = generator.submit(text, **options)
        assert handle.result(WAIT_S).token_ids == expected
        assert (handle.metrics.reused > 0) == is_reused
        assert torch.equal(generator.generate(**inputs, **options), stock(**inputs, **options))
        return expected

    with SLOSpecGenerator(
        model, tiny_model("llama", noise=0.03), config=config_of(path, request)
    ) as generator:
        before = [check(is_reused) for is_reused in (False, True)]
        CHANGES[change](model)
        after = [check(is_reused) for is_reused in (False, True)]
    assert before[0] != after[0] or change == "cast"
