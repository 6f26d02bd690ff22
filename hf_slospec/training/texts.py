"""Texts that drafters are trained on: a user's, and those that the target writes itself."""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from hf_slospec.errors import InvalidFileError, InvalidInputError
from hf_slospec.model.kept_prefixes import num_common
from hf_slospec.training.options import TrainingOptions

BEGINNING = 48  # tokens of a plain text that the target continues
TURN = 96  # maximum tokens of a user's turn that the target writes
# tokens of an answer, and with its prompt; shorter texts are left out
MIN_NEW = 4
MIN_LEN = 24
WINDOW = 16  # batches among which texts are divided by their lengths
MAX_EMPTY = 16  # batches in a row without a text to train on
# characters: shorter turns exclude nothing; of longer ones, these are looked for
MIN_EXCLUDED = 24
COMPARED = 64
KEYS = ("messages", "conversations", "turns")
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
GIVEN = "given"
GREEDY = "greedy"
SAMPLED = "sampled"


class TrainingText(NamedTuple):
    """Tokens to train on."""

    ids: list[int]
    begin: int  # index of the first token that counts; those before it are a prompt


class Item(NamedTuple):
    """A prompt, and how a user's text goes on behind it."""

    prompt: list[int]
    given: TrainingText | None = None


class Source(NamedTuple):
    """Prompts of texts."""

    # Takes the batch's number and a seed; batch 0 is held out
    items: Callable[[int, int], list[Item]]
    modes: tuple[str, ...]  # Modes of the batches, in turn; batch 0 is greedy.


# Continues prompts by the target; takes the prompts, maximum new tokens, whether greedy, and a
# seed.
Write = Callable[[Sequence[list[int]], int, bool, int], list[list[int]]]


def shuffled(seed: int, number: int) -> Callable[[int], int]:
    """Return a function from a position in an endless sequence to an index; each pass over all
    indices has a random order of its own.
    """

    @functools.cache
    def order(epoch: int) -> list[int]:
        return random.Random(f"{seed} {epoch}").sample(range(number), number)

    return lambda position: order(position // number)[position % number]


def batches(seed: int, lengths: Sequence[int], size: int) -> Callable[[int], list[int]]:
    """Return a function from the training step to the indices of its texts; each epoch has a random
    order of its own.

    Texts of a batch have similar lengths, as shorter ones are padded to the longest.
    """
    width = max(1, min(WINDOW, len(lengths) // size))  # larger windows would hold copies of texts
    text_at = shuffled(seed, len(lengths))
    batch_at = shuffled(seed, width)

    def batch(step: int) -> list[int]:
        begin = step // width * width * size
        window = sorted(map(text_at, range(begin, begin + width * size)), key=lengths.__getitem__)
        first = batch_at(step) * size
        return window[first : first + size]

    return batch


def collect(
    path: Path,
    source: Source,
    write: Write,
    is_wanted: Callable[[list[int]], bool],
    options: TrainingOptions,
    is_late: Callable[[], bool],
    show: Callable[[int], None],
) -> tuple[list[TrainingText], list[TrainingText]] | None:
    """Return held-out texts and training texts: those of a file, and those that it lacks, which are
    added to it.

    Args:
        path: file with a line per batch; a line that was interrupted is written anew.
        source: the prompts.
        write: continues prompts.
        is_wanted: returns whether to train on these tokens.
        options: number and length of texts, and the seed.
        is_late: returns whether to stop.
        show: called with the number of training texts.

    Returns:
        The texts; None if there was no time for all of them.

    Raises:
        InvalidInputError: hardly any text can be used.
    """
    batches: list[list[TrainingText]] = []
    if path.exists():
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
        batches = [[TrainingText(*text) for text in json.loads(line)] for line in lines]
        os.truncate(path, sum(len(line) + 1 for line in lines))
    while (total := sum(map(len, batches[1:]))) < options.texts:
        show(total)
        if is_late():
            return None
        seed = options.seed * 1_000_003 + 2 * (number := len(batches))
        mode = source.modes[number % len(source.modes)] if number else GREEDY
        texts = _answered(source.items(number, seed), mode, write, options.seq_len, seed + 1)
        batches.append(
            [t for t in texts if len(t.ids) >= max(t.begin + MIN_NEW, MIN_LEN) and is_wanted(t.ids)]
        )
        if not batches[0] or not any(batches[-MAX_EMPTY:]):
            raise InvalidInputError(
                f"there is hardly a text to train on: they must have at least {MIN_LEN} tokens, "
                f"{MIN_NEW} of them "
                f"behind a prompt within --seq-len {options.seq_len}, and hold no turn of "
                "--exclude; give other --data"
            )
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(batches[-1]) + "\n")
    return batches[0], [text for batch in batches[1:] for text in batch][: options.texts]


def _answered(
    items: Sequence[Item], mode: str, write: Write, seq_len: int, seed: int
) -> Iterator[TrainingText]:
    """Yield texts as they are given, or with answers of the target to those prompts that leave room
    for one.
    """
    asked = []
    for item in items:
        if mode == GIVEN and item.given is not None:
            yield TrainingText(item.given.ids[:seq_len], item.given.begin)
        elif len(item.prompt) <= seq_len - MIN_NEW:
            asked.append(item.prompt)
    if asked:
        answers = write(asked, seq_len - min(map(len, asked)), mode == GREEDY, seed)
        for prompt, answer in zip(asked, answers, strict=True):
            yield TrainingText([*prompt, *answer][:seq_len], len(prompt))


# ---------------------------------------------------------------- a user's texts


def read_data(path: Path, tokenizer: Any, seq_len: int, seed: int, batch: int) -> Source:
    """Return the prompts in a file of conversations (.jsonl) or of plain text, ``batch`` at once.

    Raises:
        InvalidInputError: the file cannot be read, holds too little, or the tokenizer has no chat
            template.
        InvalidFileError: a line holds no conversation; the message has its number.
    """
    if path.suffix == ".jsonl":
        if getattr(tokenizer, "chat_template", None) is None:
            raise InvalidInputError(
                f"--data {path} holds conversations, and the target's tokenizer has no chat "
                "template; give plain text in a file with another ending"
            )
        items = [_item(tokenizer, messages, where) for where, messages in conversations(path)]
    else:
        ids = tokenizer(_read(path))["input_ids"]
        windows = [ids[begin : begin + seq_len] for begin in range(0, len(ids), seq_len)]
        items = [
            Item(window[:BEGINNING], TrainingText(window, 1))
            for window in windows
            if len(window) >= BEGINNING + MIN_NEW
        ]
    if len(items) < 2:
        raise InvalidInputError(
            f"--data {path} holds too little text: one for training and one to hold out are needed"
        )
    random.Random(seed).shuffle(items)
    num_held_out = min(batch, max(1, len(items) // 8))
    held_out = items[:num_held_out]
    training = items[num_held_out:]
    text_at = shuffled(seed, len(training))
    return Source(
        lambda number, _: (
            [training[text_at((number - 1) * batch + i)] for i in range(batch)]
            if number
            else held_out
        ),
        (SAMPLED, GIVEN, GREEDY, GIVEN) if any(item.given for item in items) else (SAMPLED, GREEDY),
    )


def conversations(path: Path) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Yield the conversations of a file of JSON lines, each with its file and line; raises
    InvalidFileError.
    """
    for number, line in enumerate(_read(path).split("\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidFileError(
                    f"{where}: is not JSON: {error}; each line must hold an object"
                ) from error
            yield where, _messages(record, where)


def _messages(record: Any, where: str) -> list[dict[str, str]]:
    """Return the messages of a conversation, with roles and contents for chat templates."""
    listed = (
        next((record[key] for key in KEYS if key in record), None)
        if isinstance(record, dict)
        else None
    )
    if not isinstance(listed, list) or not listed:
        raise InvalidFileError(
            f"{where}: must be an object with a list under {', '.join(KEYS[:-1])} or {KEYS[-1]}"
        )
    messages = []
    for one in listed:
        fields = (
            {"role": "user", "content": one}
            if isinstance(one, str)
            else one
            if isinstance(one, dict)
            else {}
        )
        role = fields.get("role", fields.get("from"))
        content = fields.get("content", fields.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise InvalidFileError(
                f"{where}: a message must have texts as role and content, or as from and value"
            )
        messages.append({"role": ROLES.get(role, role), "content": content})
    if not any(message["role"] == "user" for message in messages):
        raise InvalidFileError(
            f"{where}: has no turn of the user; at least one message must have the role user"
        )
    return messages


def _item(tokenizer: Any, messages: list[dict[str, str]], where: str) -> Item:
    """Return the first turn of a conversation as prompt, and all of it as text if an assistant has
    answered.
    """
    end = 1 + [message["role"] for message in messages].index("user")
    prompt = _encoded(tokenizer, _rendered(tokenizer, messages[:end], True, where))
    if end == len(messages) or messages[-1]["role"] != "assistant":
        return Item(prompt)
    whole = _encoded(tokenizer, _rendered(tokenizer, messages, False, where))
    return Item(prompt, TrainingText(whole, num_common(prompt, whole)))


def _rendered(tokenizer: Any, messages: list[dict[str, str]], asks: bool, where: str) -> str:
    """Return a conversation as text, with the beginning of an answer if it asks for one."""
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        )
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise InvalidInputError(
            f"{where}: the target's chat template cannot render this: {error}"
        ) from error


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"{path} cannot be read: {error}; give a file of UTF-8 text"
        ) from error


# ---------------------------------------------------------------- the target's own texts


def own_texts(tokenizer: Any, write: Write, batch: int) -> Source:
    """Return prompts that the target writes: user's turns behind its chat template's beginning, or
    any text without.

    It writes ``batch`` of them at once.

    Raises:
        InvalidInputError: the chat template does not show turns, or there is no token to begin
            with.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if first is None:
            raise InvalidInputError(
                "the target's tokenizer has no chat template, no bos_token and no eos_token to "
                "begin a text with; give texts with --data"
            )

        def items(_: int, seed: int) -> list[Item]:
            begun = write([[first]] * batch, BEGINNING, False, seed)
            return [Item([first, *ids]) for ids in begun if len(ids) == BEGINNING]

        return Source(items, (SAMPLED, GREEDY))

    def asking(turn: str) -> str:
        return _rendered(tokenizer, [{"role": "user", "content": turn}], True, "without --data")

    mark = "hf_slospec-turn"
    beginning_text, _, behind = asking(mark).partition(mark)
    if not behind:
        raise InvalidInputError(
            "the target's chat template does not show the user's turn; give texts with --data"
        )
    beginning = _encoded(tokenizer, beginning_text)

    def asked_items(_: int, seed: int) -> list[Item]:
        written = write([beginning] * batch, TURN, False, seed)
        turns = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in written]
        return [Item(_encoded(tokenizer, asking(turn))) for turn in turns if turn]

    return Source(asked_items, (SAMPLED, GREEDY))


# ---------------------------------------------------------------- exclusion


def read_excluded(paths: Sequence[Path]) -> list[str]:
    """Return the beginnings of all users' turns in files of conversations; raises as
    :func:`read_data`.
    """
    messages = [
        message
        for path in paths
        for _, conversation in conversations(path)
        for message in conversation
    ]
    turns = [_plain(message["content"]) for message in messages if message["role"] == "user"]
    return [turn[:COMPARED] for turn in turns if len(turn) >= MIN_EXCLUDED]


def is_excluded(text: str, excluded: Sequence[str]) -> bool:
    """Return whether a text holds one of these, whatever its case, punctuation and white space."""
    plain = _plain(text)
    return any(turn in plain for turn in excluded)


def _plain(text: str) -> str:
    """Return the letters and digits of a text, in lower case."""
    return "".join(filter(str.isalnum, text.lower()))
