"""Images in submitted requests: as tensors, by a processor, after preemption, and over HTTP."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from hf_slospec import InvalidInputError, SLOSpecConfig, SLOSpecGenerator
from hf_slospec.server.engine import LocalEngine
from hf_slospec.server.limits import RequestLimits
from tests.server.conftest import serving
from tests.support.served_pair import WAIT_S, Holds
from tests.support.toys.tiny_image_models import (
    IMAGE,
    PATCH,
    SIDE,
    prompts_with_images,
    tiny_image_model,
)

NAME = "Qwen2VLForConditionalGeneration"
CONFIG = SLOSpecConfig(check_invariants=True, kv_tokens=4_000, max_batch=2)
OPTIONS = dict(max_new_tokens=24, pad_token_id=0, eos_token_id=2)
LETTERS = "".join(map(chr, range(32, 32 + IMAGE - 3)))


class Letters:
    """A tokenizer and processor of letters; an image, ``<i>`` in texts, is cut into patches."""

    chat_template = "a template"

    @property
    def tokenizer(self):
        return self

    def decode(self, ids, **_):
        return "".join(
            LETTERS[i - 3] if 3 <= i < IMAGE else "?"
            for i in ([ids] if isinstance(ids, int) else ids)
        )

    def __call__(self, text, images=None, **_):
        if images is None:
            return {"input_ids": [3 + LETTERS.index(letter) for letter in text]}
        pieces = text[0].split("<i>")
        if len(pieces) != len(images) + 1:
            raise ValueError(f"{len(pieces) - 1} placeholders for {len(images)} images")
        ids = self(pieces[0])["input_ids"]
        for piece in pieces[1:]:
            ids += [IMAGE] * 4 + self(piece)["input_ids"]
        pixels = [
            torch.from_numpy(np.array(image.resize((SIDE, SIDE)))).float() / 255 for image in images
        ]
        patches = [
            pixel.reshape(16, PATCH, PATCH * 3).repeat(1, 2, 1).flatten(1) for pixel in pixels
        ]
        found = {"input_ids": torch.tensor([ids]), "pixel_values": torch.cat(patches)}
        kinds = (found["input_ids"] == IMAGE).long()
        grids = torch.tensor([[1, 4, 4]] * len(images))
        return found | {
            "attention_mask": torch.ones_like(kinds),
            "mm_token_type_ids": kinds,
            "image_grid_thw": grids,
        }

    def apply_chat_template(self, messages, tools=None, return_tensors=None, **_):
        contents = [message["content"] for message in messages]
        parts = [
            part for own in contents for part in ([{"text": own}] if isinstance(own, str) else own)
        ]
        text = "".join(part.get("text", "<i>") for part in parts) + "!"
        images = [part["image"] for part in parts if "image" in part]
        return self([text], images) if return_tensors else self(text)


@pytest.fixture(scope="module")
def generator():
    model = tiny_image_model(NAME)
    draft = tiny_image_model(NAME, noise=0.03)
    with SLOSpecGenerator(model, draft, config=CONFIG, processor=Letters()) as made:
        yield made


def picture(seed, width=20):
    pixels = np.random.default_rng(seed).integers(0, 256, (20, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def data_url(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def alone(inputs, seed=0, **options):
    model = tiny_image_model(NAME)
    torch.manual_seed(seed)
    out = type(model).generate(model, **inputs, **OPTIONS | options)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def submitted(generator, inputs, **options):
    beside = {
        name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")
    }
    return generator.submit(inputs["input_ids"], **beside, **OPTIONS | options)


def test_requests_with_equal_tokens_and_other_images_share_nothing(generator):
    model = tiny_image_model(NAME)
    first = prompts_with_images(model, 5, (2,))
    second = first | {"pixel_values": torch.rand_like(first["pixel_values"])}
    text = {name: first[name] for name in ("input_ids", "attention_mask")}
    expected = [alone(inputs, eos_token_id=None) for inputs in (first, second, text)]
    assert expected[0] != expected[1]
    for _ in range(2):
        handles = [
            submitted(generator, inputs, eos_token_id=None) for inputs in (first, second, text)
        ]
        assert [handle.result(WAIT_S).token_ids for handle in handles] == expected
        assert handles[0].metrics.reused == handles[1].metrics.reused == 0
    sampled = submitted(generator, first, do_sample=True, temperature=0.8, seed=3)
    assert sampled.result(WAIT_S).token_ids == alone(first, 3, do_sample=True, temperature=0.8)


def test_preempted_requests_are_processed_again_with_their_images(generator):
    prompts = [prompts_with_images(tiny_image_model(NAME), seed, (1,)) for seed in range(4)]
    expected = [alone(inputs, max_new_tokens=60, eos_token_id=None) for inputs in prompts]
    options = dict(max_new_tokens=60, eos_token_id=None)
    spare = [submitted(generator, prompts[0], **options)]
    with Holds() as holds:
        spare.append(submitted(generator, prompts[1], **options, stopping_criteria=[holds]))
        assert holds.is_reached.wait(WAIT_S)
        urgent = [
            submitted(generator, p, **options, slo_tpot=10.0, slo_ttft=100.0) for p in prompts[2:]
        ]
    assert [handle.result(WAIT_S).token_ids for handle in (*spare, *urgent)] == expected
    assert sum(handle.metrics.preempted for handle in spare) > 0
    assert all(handle.request.params.prefill is None for handle in spare), (
        "images outlive their requests"
    )


def test_submitted_images_leave_no_trace_on_the_model(generator):
    model = tiny_image_model(NAME)
    alone(prompts_with_images(model, 6, (2,)))
    left = model.model.rope_deltas
    submitted(generator, prompts_with_images(model, 7, (1,))).result(WAIT_S)
    assert model.model.rope_deltas is left


def test_texts_and_messages_with_images(generator):
    images = [picture(1), picture(2)]
    letters = Letters()
    expected = alone(letters(["a <i> and <i> here"], images))
    handle = generator.submit("a <i> and <i> here", images=images, **OPTIONS)
    assert handle.result(WAIT_S).token_ids == expected
    parts = [
        {"type": "text", "text": "one "},
        {"type": "image", "image": images[0]},
        {"type": "text", "text": " here"},
    ]
    handle = generator.submit([{"role": "user", "content": parts}], **OPTIONS)
    assert handle.result(WAIT_S).token_ids == alone(letters(["one <i> here!"], images[:1]))
    with pytest.raises(
        InvalidInputError, match=r"the processor refused .* 1 placeholders for 2 images"
    ):
        generator.submit("one <i> here", images=images)
    with pytest.raises(InvalidInputError, match="images goes with a text"):
        generator.submit([5, 6, 7], images=images)
    bare = SLOSpecGenerator(generator.model, config=CONFIG)
    with bare, pytest.raises(InvalidInputError, match="images need a processor"):
        bare.submit("one <i> here", images=images[:1])


def test_images_over_http(generator, monkeypatch):
    def asked(url, **part):
        parts = [
            {"type": "text", "text": "see "},
            {"type": "image_url", "image_url": {"url": url} | part},
        ]
        body = {
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": 12,
            "temperature": 0,
        }
        return client.post("/v1/chat/completions", json=body)

    engine = LocalEngine(generator, template=None)
    engine.response_template = None
    with serving(engine, bounds=RequestLimits(pixels=20 * 200)) as served:
        client = served.client
        image, wide = picture(3), picture(4, width=400)
        answer = asked(data_url(image), detail="low")
        assert answer.status_code == 200, answer.text
        inputs = Letters()(["see <i>!"], [image])
        expected = alone(
            inputs, max_new_tokens=12, eos_token_id=generator.model.generation_config.eos_token_id
        )
        assert answer.json()["choices"][0]["message"]["content"] == Letters().decode(
            expected
        ).rstrip("?")
        assert answer.json()["usage"]["prompt_tokens"] == inputs["input_ids"].shape[1]
        whole = data_url(image)
        for bad, named in (
            ("https://example.org/cat.png", "data URL"),
            ("file:///etc/passwd", "data URL"),
            ("data:text/plain;base64,QUJD", "data URL"),
            ("data:image/png," + whole[22:], "data URL"),
            ("data:image/png;base64,@@@", "base64"),
            ("data:image/png;base64,QUJD", "cannot be read"),
            (whole[: len(whole) // 8 * 4 + 2], "cannot be read"),
            (data_url(wide), "pixels"),
            (7, "url"),
        ):
            answer = asked(bad)
            assert answer.status_code == 400 and named in answer.json()["error"]["message"], (
                answer.text
            )
        engine.processor = None
        answer = asked(whole)
        assert answer.status_code == 400 and "takes no images" in answer.json()["error"]["message"]
