"""One text streamed in three ways: by the two streamers of transformers, and from a submitted
request.

    python examples/streaming.py

A step commits several tokens at once. The streamers of transformers get them one by one and print
complete words; a handle yields the text of each step, separated here by ``|``. Runs on the embedded
pair, its target inflated to about
0.1 B parameters; nothing is downloaded.
"""

from __future__ import annotations

import threading
import time

import torch
from transformers import TextIteratorStreamer, TextStreamer

from hf_slospec import SLOSpecGenerator, load_tiny_pair
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES

PROMPT = 'def fibonacci(n):\n    """Return the first n Fibonacci numbers."""\n'


def main(new_tokens: int = 64) -> None:
    tiny, draft, tokenizer = load_tiny_pair(torch.float32)
    gen = SLOSpecGenerator(inflate(tiny, SHAPES["0.1B"]), draft, tokenizer)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    options = dict(max_new_tokens=new_tokens, do_sample=False, slo_tpot=0.1)
    gen.generate(**inputs, max_new_tokens=2)  # measures step times, once per machine

    print("--- generate(streamer=TextStreamer(...)) prints while it decodes")
    ids = gen.generate(**inputs, **options, streamer=TextStreamer(tokenizer, skip_prompt=True))
    text = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])

    print("--- generate in a thread, read from a TextIteratorStreamer")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(
        target=gen.generate, kwargs=dict(**inputs, **options, streamer=streamer)
    )
    thread.start()
    pieces = list(streamer)  # a client would show each piece at once
    thread.join()
    print(f"{len(pieces)} pieces, the same text: {'yes' if ''.join(pieces) == text else 'no'}")

    print("--- submit(...), for any number of concurrent requests: one piece per step")
    with gen:
        begun_s = time.perf_counter()
        handle = gen.submit(PROMPT, **options)
        for number, piece in enumerate(handle):
            if number == 0:
                first_s = time.perf_counter() - begun_s
            print(piece, end="|", flush=True)
    result = handle.result()
    print(
        f"\nfirst piece after {first_s:.2f} s; {len(result.token_ids)} tokens in {len(handle.commits)} steps"
    )
    print(
        f"{sum(handle.from_draft)} accepted draft tokens, the same text: {'yes' if result.text == text else 'no'}"
    )


if __name__ == "__main__":
    main()
