"""Texts to train on: files in all forms, prompts of the target's own, exclusion, interruption, and
errors.
"""

from __future__ import annotations

import itertools
import json
import random

import pytest

from hf_slospec import load_tiny_pair
from hf_slospec.errors import InvalidFileError, InvalidInputError
from hf_slospec.training import texts
from hf_slospec.training.options import TrainingOptions
from hf_slospec.training.texts import (
    TrainingText,
    batches,
    collect,
    is_excluded,
    own_texts,
    read_data,
    read_excluded,
)

SEQ_LEN = 96
BATCH = 16
CHAT_TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)


@pytest.fixture
def tokenizer():
    own = load_tiny_pair()[2]
    own.chat_template = CHAT_TEMPLATE
    return own


class Writer:
    """Answers with tokens that tell the call; records what was asked."""

    def __init__(self, length=30):
        self.length = length
        self.calls = list[tuple[list[list[int]], int, bool, int]]()

    def __call__(self, prompts, new, is_greedy, seed):
        self.calls.append(([*prompts], new, is_greedy, seed))
        return [[2000 + len(self.calls)] * min(new, self.length) for _ in prompts]


def lines(path, *records):
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def chat(text):
    return {
        "messages": [
            {"role": "user", "content": text},
            {"role": "assistant", "content": f"{text}, and back"},
        ]
    }


def collected(
    path,
    source,
    write,
    tokenizer,
    excluded=(),
    num_texts=64,
    is_late=False,
):
    options = TrainingOptions(texts=num_texts, seq_len=SEQ_LEN)

    def is_wanted(ids):
        return not is_excluded(tokenizer.decode(ids), excluded)

    return collect(path, source, write, is_wanted, options, lambda: is_late, lambda _: None)


@pytest.mark.parametrize(
    "record",
    [
        chat("Who goes there?"),
        {"conversations": [{"from": "human", "value": "Who goes there?"},
                           {"from": "gpt", "value": "Who goes there?, and back"}]},
    ],
)  # fmt: skip
def test_conversations_of_either_form(record, tmp_path, tokenizer):
    source = read_data(lines(tmp_path / "own.jsonl", record, record), tokenizer, SEQ_LEN, 0, BATCH)
    (item, *_) = source.items(1, 0)
    assert tokenizer.decode(item.prompt) == "# user: Who goes there?\n# assistant: "
    assert item.given is not None
    assert (
        tokenizer.decode(item.given.ids)
        == "# user: Who goes there?\n# assistant: Who goes there?, and back\n"
    )
    assert 0 < item.given.begin <= len(item.prompt)


def test_turns_without_answers_are_prompts_only(tmp_path, tokenizer):
    source = read_data(
        lines(tmp_path / "own.jsonl", *[{"turns": ["One?", "Two?"]}] * 2),
        tokenizer,
        SEQ_LEN,
        0,
        BATCH,
    )
    (item, *_) = source.items(1, 0)
    assert (
        item.given is None
        and "One?" in tokenizer.decode(item.prompt)
        and "Two?" not in tokenizer.decode(item.prompt)
    )


def test_plain_text_is_cut_into_windows(tmp_path, tokenizer):
    (tmp_path / "own.txt").write_text("def function(x):\n    return x + 1\n" * 80)
    source = read_data(tmp_path / "own.txt", tokenizer, SEQ_LEN, 0, BATCH)
    for item in (*source.items(0, 0), *source.items(1, 0)):
        assert item.given is not None and item.given.ids[: texts.BEGINNING] == item.prompt
        assert len(item.given.ids) <= SEQ_LEN


def test_batches_hold_every_text_once_per_order_and_little_padding():
    rng = random.Random(0)
    lengths = [rng.randint(20, 400) for _ in range(640)]
    size = 8
    batch = batches(3, lengths, size)
    for epoch in range(2):
        steps = [batch(step) for step in range(epoch * 80, epoch * 80 + 80)]
        assert sorted(itertools.chain(*steps)) == list(range(640))
        padded = sum(size * max(lengths[index] for index in own) for own in steps)
        assert padded < 1.1 * sum(lengths)  # 1.7 in random order
    assert all(
        len({*batches(3, lengths[:16], size)(step)}) == size for step in range(9)
    )  # no text twice
    assert batches(3, lengths[:1], size)(5) == [0] * size
    means = [sum(lengths[index] for index in own) / size for own in steps]
    assert sorted(means[:16]) != means[:16]  # not the shortest first


def test_half_of_the_texts_are_written_by_the_target_greedy_and_sampled_in_turn(
    tmp_path, tokenizer
):
    data = lines(
        tmp_path / "own.jsonl",
        *[chat(f"Is {number} more than {number + 1} times?") for number in range(40)],
    )
    write = Writer()
    held_out, training = collected(
        tmp_path / "texts", read_data(data, tokenizer, SEQ_LEN, 0, BATCH), write, tokenizer
    )
    assert [is_greedy for _, _, is_greedy, _ in write.calls] == [True, True, False]
    assert len({seed for *_, seed in write.calls}) == 3
    assert sum(text.ids[-1] > 2000 for text in training) == 32 and len(training) == 64
    written = [text for text in training if text.ids[-1] == 2002]
    assert written and all(text.ids[text.begin :] == [2002] * 30 for text in written)
    prompts = {tuple(text.ids[: text.begin]) for text in held_out}
    assert len(prompts) == len(held_out) == 5 and not prompts & {
        tuple(text.ids[: text.begin]) for text in training
    }


def test_the_target_writes_the_users_turns_and_answers_them(tmp_path, tokenizer):
    write = Writer()
    held_out, training = collected(
        tmp_path / "texts", own_texts(tokenizer, write, BATCH), write, tokenizer, num_texts=20
    )
    beginning = write.calls[0][0][0]
    turn = tokenizer.decode([2001] * 30).strip()
    assert tokenizer.decode(beginning) == "# user: "
    assert (
        tokenizer.decode(held_out[0].ids[: held_out[0].begin]) == f"# user: {turn}\n# assistant: "
    )
    assert held_out[0].ids[held_out[0].begin :] == [2002] * 30
    assert [is_greedy for _, _, is_greedy, _ in write.calls] == [False, True] * 2 + [False, False]
    assert len(held_out) == BATCH and len(training) == 20


def test_a_base_model_begins_with_any_text(tmp_path, tokenizer):
    tokenizer.chat_template = None
    write = Writer(length=texts.BEGINNING)
    held_out, _ = collected(
        tmp_path / "texts", own_texts(tokenizer, write, BATCH), write, tokenizer, num_texts=1
    )
    assert held_out[0] == TrainingText(
        [tokenizer.bos_token_id, *[2001] * texts.BEGINNING, *[2002] * 47], texts.BEGINNING + 1
    )


def test_texts_with_excluded_turns_are_left_out(tmp_path, tokenizer):
    secret = "What is the answer to the ultimate question?"
    data = lines(
        tmp_path / "own.jsonl",
        *[chat(secret if number % 2 else f"{number}?" * 9) for number in range(20)],
    )
    excluded = read_excluded([lines(tmp_path / "bench.jsonl", {"turns": ["Hi", secret.upper()]})])
    assert len(excluded) == 1
    source = read_data(data, tokenizer, SEQ_LEN, 0, BATCH)
    write = Writer()
    held_out, training = collected(
        tmp_path / "texts", source, write, tokenizer, excluded=excluded, num_texts=32
    )
    shown = [tokenizer.decode(text.ids) for text in (*held_out, *training)]
    assert len(training) == 32 and not any("ultimate" in text for text in shown)


def test_an_interrupted_collection_goes_on(tmp_path, tokenizer):
    whole = tmp_path / "whole"
    write = Writer()
    expected = collected(whole, own_texts(tokenizer, write, BATCH), write, tokenizer)
    part = tmp_path / "part"
    part.write_text(whole.read_text().split("\n", 1)[0] + "\n[[[1, 2")
    # Calls are counted from those that wrote the first line.
    again = Writer()
    again.calls = write.calls[:2]
    assert (
        collected(part, own_texts(tokenizer, again, BATCH), again, tokenizer, is_late=True) is None
    )
    assert collected(part, own_texts(tokenizer, again, BATCH), again, tokenizer) == expected
    assert part.read_text() == whole.read_text() and again.calls == write.calls


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{\n", r"own.jsonl:2: is not JSON: .*; each line must hold an object"),
        (
            "[1]\n",
            r"own.jsonl:2: must be an object with a list under messages, conversations or turns",
        ),
        ('{"messages": []}\n', r"own.jsonl:2: must be an object with a list"),
        (
            '{"messages": [{"role": "user", "content": [1]}]}\n',
            r"own.jsonl:2: a message must have texts as role",
        ),
        (
            '{"messages": [{"role": "system", "content": "x"}]}\n',
            r"own.jsonl:2: has no turn of the user",
        ),
    ],
)
def test_a_bad_line_is_named_by_its_number(content, message, tmp_path, tokenizer):
    path = lines(tmp_path / "own.jsonl", chat("Who?"))
    path.write_text(path.read_text() + content)
    with pytest.raises(InvalidFileError, match=message):
        read_data(path, tokenizer, SEQ_LEN, 0, BATCH)


def test_unusable_data_is_refused(tmp_path, tokenizer):
    path = lines(tmp_path / "own.jsonl", chat("Who?"))
    with pytest.raises(InvalidInputError, match="holds too little text"):
        read_data(path, tokenizer, SEQ_LEN, 0, BATCH)
    with pytest.raises(InvalidInputError, match="nowhere cannot be read"):
        read_data(tmp_path / "nowhere", tokenizer, SEQ_LEN, 0, BATCH)
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(
        InvalidInputError, match=r"own.jsonl:1: the target's chat template cannot render this: no"
    ):
        read_data(path, tokenizer, SEQ_LEN, 0, BATCH)
    tokenizer.chat_template = "nothing"
    with pytest.raises(
        InvalidInputError, match="does not show the user's turn; give texts with --data"
    ):
        own_texts(tokenizer, Writer(), BATCH)
    tokenizer.chat_template = None
    with pytest.raises(
        InvalidInputError,
        match="holds conversations, and the target's tokenizer has no chat template",
    ):
        read_data(path, tokenizer, SEQ_LEN, 0, BATCH)
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(InvalidInputError, match="no bos_token and no eos_token"):
        own_texts(tokenizer, Writer(), BATCH)


def test_texts_without_answers_are_refused(tmp_path, tokenizer):
    write = Writer(length=1)
    with pytest.raises(InvalidInputError, match=f"at least {texts.MIN_LEN} tokens"):
        collected(tmp_path / "texts", own_texts(tokenizer, write, BATCH), write, tokenizer)
