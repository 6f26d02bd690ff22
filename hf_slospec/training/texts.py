"""Texts that drafters are trained on: from a user's file, or written by the target."""

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

BEGINNING = 48  # tokens at the beginning of a plain text, which are the prompt
TURN = 96  # maximum tokens of a user's turn that the target writes
# Minimum tokens of an answer, and of prompt and answer; shorter texts are left out
MIN_NEW = 4
MIN_LEN = 24
WINDOW = 16  # the texts of so many batches are sorted by length, then split into batches
MAX_EMPTY = 16  # consecutive batches without a usable text after which collect() fails
# Characters: turns shorter than MIN_EXCLUDED exclude nothing, of longer turns the first COMPARED
# characters are searched for
MIN_EXCLUDED = 24
COMPARED = 64
KEYS = ("messages", "conversations", "turns")
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
GIVEN = "given"
GREEDY = "greedy"
SAMPLED = "sampled"


class TrainingText(NamedTuple):
    """A text to train on, as tokens: a prompt and its continuation."""

    ids: list[int]
    begin: int  # number of prompt tokens, which do not enter the loss


class Item(NamedTuple):
    """A prompt and, if it is from a user's file, the text there that begins with it."""

    prompt: list[int]
    given: TrainingText | None = None


class Source(NamedTuple):
    """Source of prompts, batch by batch."""

    # (number of the batch, seed) -> prompts; batch 0 is held out
    items: Callable[[int, int], list[Item]]
    # For the batches in turn: GIVEN (the user's texts), or GREEDY or SAMPLED answers of the target;
    # batch 0 is always GREEDY
    modes: tuple[str, ...]


# Lets the target continue prompts: (prompts, maximum new tokens, whether greedy, seed) -> new
# tokens of every prompt
Write = Callable[[Sequence[list[int]], int, bool, int], list[list[int]]]


def shuffled(seed: int, number: int) -> Callable[[int], int]:
    """Return a function from a position in an endless sequence to an index below ``number``. The
    sequence is a concatenation of random permutations of all indices.
    """

    @functools.cache
    def order(epoch: int) -> list[int]:
        return random.Random(f"{seed} {epoch}").sample(range(number), number)

    return lambda position: order(position // number)[position % number]


def batches(seed: int, lengths: Sequence[int], size: int) -> Callable[[int], list[int]]:
    """Return a function from a training step to the indices of its texts, in a random order that
    differs from epoch to epoch.

    Texts of a batch have similar lengths, as shorter ones are padded to the longest.
    """
    width = max(1, min(WINDOW, len(lengths) // size))  # a larger window would hold texts twice
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
    """Read held-out texts and training texts from a file, and append texts to it until there are
    ``options.texts``.

    Args:
        path: file with a line per batch; an incomplete last line is written anew.
        source: prompts of the missing texts.
        write: lets the target continue prompts.
        is_wanted: takes the tokens of a text; returns whether to train on it.
        options: number and length of texts, and the seed.
        is_late: returns whether to stop.
        show: called with the number of training texts so far.

    Returns:
        Held-out texts and training texts; None if ``is_late`` stopped the writing.

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
    """Yield the texts of a batch: in mode GIVEN the user's text of an item that has one, otherwise
    the prompt with the target's answer. Prompts that leave no room for an answer are skipped.
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
    """Return the prompts in a file of conversations (.jsonl) or of plain text, in batches of
    ``batch``.

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
    """Yield the conversations in a file of JSON lines, each as "file:line" and messages.

    Raises:
        InvalidFileError: a line holds no conversation.
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
    """Return a conversation up to its first user turn as prompt and, if it ends with an assistant's
    answer, the whole conversation as text.
    """
    end = 1 + [message["role"] for message in messages].index("user")
    prompt = _encoded(tokenizer, _rendered(tokenizer, messages[:end], True, where))
    if end == len(messages) or messages[-1]["role"] != "assistant":
        return Item(prompt)
    whole = _encoded(tokenizer, _rendered(tokenizer, messages, False, where))
    return Item(prompt, TrainingText(whole, num_common(prompt, whole)))


def _rendered(tokenizer: Any, messages: list[dict[str, str]], asks: bool, where: str) -> str:
    """Return a conversation as text, rendered by the target's chat template; ``asks`` appends the
    beginning of an answer.
    """
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
    """Return a source of prompts that the target writes: user turns in its chat template or, if it
    has none, the beginnings of texts.

    It writes ``batch`` prompts at once.

    Raises:
        InvalidInputError: the chat template leaves out user turns, or the tokenizer has no token
            that a text can begin with.
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
    """Return the beginnings of all user turns in files of conversations, reduced to lower-case
    letters and digits, for :func:`is_excluded`; raises as :func:`conversations`.
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
    """Return whether a text contains one of the excluded beginnings; case, punctuation and white
    space do not matter.
    """
    plain = _plain(text)
    return any(turn in plain for turn in excluded)


def _plain(text: str) -> str:
    """Return the letters and digits of a text, in lower case."""
    return "".join(filter(str.isalnum, text.lower()))
