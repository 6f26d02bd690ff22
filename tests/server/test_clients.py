"""OpenAI's own client, many streams at a time."""

from __future__ import annotations

import asyncio

import openai

from hf_slospec import tiny_prompts
from tests.server.test_completions import alone, text_of
from tests.support.breadth import quick_or

PROMPTS = [prompt[:80] for prompt in tiny_prompts()[:8]]


def test_many_streams_at_a_time_are_those_of_generate(served):
    async def one(client, index):
        stream = await client.completions.create(
            model="tiny", prompt=PROMPTS[index % len(PROMPTS)], max_tokens=quick_or(10, 16), stream=True, seed=index,
            temperature=0.0 if index % 2 else 0.9, extra_body={"slo_tpot": 1.0, "top_k": -1},
        )  # fmt: skip
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, index) for index in range(quick_or(16, 32))))

    texts = asyncio.run(all_of_them())
    for index, text in enumerate(texts):
        options = (
            dict(do_sample=False) if index % 2 else dict(do_sample=True, temperature=0.9, top_k=0)
        )
        new = alone(
            served, PROMPTS[index % len(PROMPTS)], index, max_new_tokens=quick_or(10, 16), **options
        )
        assert text == text_of(served, new)
