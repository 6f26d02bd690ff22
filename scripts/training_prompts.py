"""Write prompts, to train a drafter of SmolLM2 on: of the kinds that benchmarks of chats have, but
none of theirs.

Usage:
    git clone https://github.com/teknium1/GPTeacher && git clone
    https://github.com/sahil280114/codealpaca apt-get download debian-handbook dict-foldoc && for
    package in *.deb; do dpkg -x $package debian; done python scripts/training_prompts.py .
    prompts.jsonl python -m hf_slospec train-drafter --data prompts.jsonl --exclude
    benchmarks/data/spec_bench.jsonl ...

Every line has one turn of a user: tasks for writers and programmers (GPTeacher, Code Alpaca),
sentences to translate and passages to summarise or to answer questions from (Debian's handbook in
German and English, and FOLDOC, a dictionary of computing), questions, and sums in words, which are
made up."""

from __future__ import annotations

import argparse
import gzip
import html
import json
import random
import re
from pathlib import Path

NUM_EACH = 600  # prompts of each kind, at most
# characters
MIN_PASSAGE = 300
MAX_PASSAGE = 1500
# characters
MIN_SENTENCE = 40
MAX_SENTENCE = 220
NAMES = (
    "Anna Ben Carla David Emma Felix Grace Hugo Irene Jonas Kim Lena Max Nora Oscar Paula".split()
)
THINGS = "apples books cards eggs marbles pencils roses stamps tickets toys".split()


def tasks(path: Path) -> list[str]:
    """Return the instructions in a file of them, each with its input."""
    records = json.loads(path.read_text(encoding="utf-8"))
    return [
        "\n\n".join(filter(None, (record["instruction"], record["input"]))) for record in records
    ]


def paragraphs(folder: Path) -> list[str]:
    """Return the paragraphs of a book in HTML."""
    pages = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.html"))]
    blocks = re.findall(r'<div class="para">(.*?)</div>', "".join(pages), re.DOTALL)
    texts = (" ".join(html.unescape(re.sub("<[^>]+>", "", block)).split()) for block in blocks)
    return list(dict.fromkeys(texts))


def entries(path: Path) -> list[tuple[str, str]]:
    """Return terms and their definitions from a dictionary."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        _, _, text = file.read().partition("\n!!!Batch\n")  # behind preamble and licence
        blocks = re.split(r"\n(?=\S)", text)
    found = []
    for block in blocks:
        term, _, text = block.partition("\n")
        text = " ".join(re.sub(r"[{}]|<[^>]*>|\(\d{4}-\d\d-\d\d\)", "", text).split())
        if len(text) >= MIN_PASSAGE // 2 and not re.search("[{}]", term):
            found.append((term, text))
    return found


def summaries(passages: list[str], rng: random.Random) -> list[str]:
    """Return requests to summarise successive passages."""
    texts = []
    text = ""
    for passage in passages:
        text = f"{text} {passage}".strip()
        if len(text) >= rng.uniform(MIN_PASSAGE, MAX_PASSAGE):
            texts.append(
                rng.choice(("Summarize: ", "Summarize this text: ", "TL;DR of the following?\n\n"))
                + text
            )
            text = ""
    return [text for text in texts if len(text) < 1.5 * MAX_PASSAGE]


def sentences(passages: list[str]) -> list[str]:
    """Return the sentences of passages."""
    return [sentence for passage in passages for sentence in re.split(r"(?<=[.!?]) ", passage)]


def translations(passages: list[str], english: set[str], rng: random.Random) -> list[str]:
    """Return requests to translate single German sentences, which are not among the English ones."""
    german = (sentence for sentence in sentences(passages) if sentence not in english)
    asks = (
        "Translate German to English: {}",
        "What does this mean in English? {}",
        "Translate to English: {}",
    )
    return [rng.choice(asks).format(s) for s in german if MIN_SENTENCE <= len(s) <= MAX_SENTENCE]


def readings(terms: list[tuple[str, str]], rng: random.Random) -> list[str]:
    """Return questions with several definitions before them, one of which answers it."""
    found = []
    while len(found) < NUM_EACH:
        chosen = rng.sample(terms, 3)
        passages = "\n\n".join(f"{term}: {text[: MAX_PASSAGE // 3]}" for term, text in chosen)
        found.append(f"{passages}\n\nWhat is {rng.choice(chosen)[0]}?")
    return found


def questions(terms: list[tuple[str, str]], rng: random.Random) -> list[str]:
    """Return short questions."""
    asks = (
        "What is {}?",
        "What does {} mean?",
        "Who made {}?",
        "When was {} invented?",
        "How does {} work?",
    )
    return [rng.choice(asks).format(term) for term, _ in terms]


def sums(rng: random.Random) -> list[str]:
    """Return sums in words."""
    found = []
    while len(found) < NUM_EACH:
        (one, two), thing, other = rng.sample(NAMES, 2), *rng.sample(THINGS, 2)
        a, b, c, share = (
            rng.randint(3, 60),
            rng.randint(2, 12),
            rng.randint(2, 9),
            rng.choice((10, 20, 25, 50)),
        )
        found.append(
            rng.choice(
                (
                    f"{one} has {a} {thing} and buys {b} boxes with {c} {thing} each. {two} gets {c} of them. How many "
                    f"{thing} does {one} have left?",
                    f"A shop sells {thing} for ${b} and {other} for ${c} each. {one} buys {c} {thing} and {b} {other} "
                    f"and has ${a} left. How much money did {one} have before?",
                    f"{one} reads {a} pages a day for {b} days. {two} reads {share}% more pages a day. How many pages "
                    f"has {two} read after {c} days?",
                    f"{one} is {a + b} years old, and {two} is {b} years younger. How old will {two} be in {c} years?",
                    f"It takes {one} {b} minutes to pack {c} {thing}. How many hours do {a * c} {thing} take?",
                    f"{one} earns ${a} an hour and works {c} hours a day, {b} days a month. {share}% of it goes into "
                    f"rent. How much is left of two months?",
                )
            )
        )
    return found


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    sources = options.sources
    rng = random.Random(0)
    handbook = sources / "debian/usr/share/doc/debian-handbook/html"
    terms = entries(sources / "debian/usr/share/dictd/foldoc.dict.dz")
    english = paragraphs(handbook / "en-US")
    german = paragraphs(handbook / "de-DE")
    kinds: list[list[str]] = [
        tasks(sources / "GPTeacher/Roleplay/roleplay-simple-deduped-roleplay-instruct.json"),
        tasks(sources / "codealpaca/data/new_codealpaca.json"),
        translations(german, {*sentences(english)}, rng),
        summaries(english, rng),
        readings(terms, rng),
        questions(terms, rng),
        sums(rng),
    ]
    chosen = [prompt for kind in kinds for prompt in rng.sample(kind, min(NUM_EACH, len(kind)))]
    rng.shuffle(chosen)
    lines = (json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in chosen)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(", ".join(str(len(kind)) for kind in kinds), "->", len(chosen))


if __name__ == "__main__":
    main()
