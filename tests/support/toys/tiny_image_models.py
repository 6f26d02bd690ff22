"""Tiny random image-text models of any class, and prompts with images for them, by rule and by
exception.
"""

from __future__ import annotations

import functools
import inspect
from unittest.mock import patch

import torch
import transformers

from tests.support.toys import tiny_configs
from tests.support.toys.tiny_models import VOCAB, sharpened

# placeholders; text has smaller tokens
IMAGE = 90
VIDEO = 91
AUDIO = 92
# pixels
SIDE = 16
PATCH = 4
# Beside those of tiny_configs.
SIZES = {
    name: value
    for value, names in {
        IMAGE: "image_token_id image_token_index",
        VIDEO: "video_token_id video_token_index",
        AUDIO: "audio_token_id audio_token_index",
        93: "vision_start_token_id boi_token_id boi_token_index image_start_token_id",
        94: "vision_end_token_id eoi_token_id eoi_token_index image_end_token_id",
        SIDE: "image_size",
        PATCH: "patch_size mm_tokens_per_image image_seq_length",
        2: "depth",
        32: "embed_dim out_hidden_size projection_dim",
        64: "num_position_embeddings position_embedding_size",
    }.items()
    for name in names.split()
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
SPECIAL = {
    "AriaConfig": dict(projector_patch_to_query_dict={SIDE: 4}),
    "Gemma4Config": dict(
        vision_config=dict(model_type="gemma4_vision", hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=4, head_dim=8, patch_size=PATCH,
                           pooling_kernel_size=2, position_embedding_size=64)
    ),
    "Glm4vTextConfig": dict(rope_parameters=MROPE),
    "InternVLVisionConfig": dict(image_size=[SIDE, SIDE], patch_size=[PATCH, PATCH]),
    "LlavaNextConfig": dict(image_grid_pinpoints=PINPOINTS),
    "LlavaOnevisionConfig": dict(image_grid_pinpoints=PINPOINTS),
    "Qwen2VLTextConfig": dict(rope_parameters=MROPE),
    "Qwen2_5_VLTextConfig": dict(rope_parameters=MROPE),
    "Qwen2_5_VLVisionConfig": dict(window_size=SIDE, fullatt_block_indexes=[1]),
    "Qwen3VLTextConfig": dict(rope_parameters=MROPE),
    "Qwen3_5TextConfig": dict(rope_parameters=MROPE | {"partial_rotary_factor": 1.0}),
    "Qwen3_5MoeTextConfig": dict(rope_parameters=MROPE | {"partial_rotary_factor": 1.0}),
    "Qwen3VLVisionConfig": dict(deepstack_visual_indexes=[0, 1]),
    "VipLlavaConfig": dict(vision_feature_layers=[-1]),
}  # fmt: skip


class NoImagesError(Exception):
    """No tiny model or no image inputs of a class can be made; the message says why."""


def image_config(name):
    """Return the config of a tiny model of a class."""
    with patch.dict(tiny_configs.SIZES, SIZES), patch.dict(tiny_configs.SPECIAL, SPECIAL):
        return tiny_configs.tiny_config(getattr(transformers, name).config_class)


@functools.cache
def tiny_image_model(name, seed=0, noise=0.0):
    """Return a tiny random model of a class."""

    def build():
        model = getattr(transformers, name)(image_config(name))
        for parameter in model.parameters():
            if (
                parameter.ndim > 1 and not parameter.any()
            ):  # such as Gemma 3's projection, which would hide all images
                torch.nn.init.normal_(parameter, std=0.2)
        return model

    return sharpened(build, seed, noise)


def image_inputs(name, seed=0, images=(1,)):
    """Return a tiny model of a class, and inputs of ``generate`` with so many images in each row,
    left-padded.

    Raises:
        NoImagesError: they cannot be made, or the class has no way to images that is known here.
    """
    try:
        model = tiny_image_model(name)
        return model, prompts_with_images(model, seed, images)
    except NoImagesError:
        raise
    except Exception as error:  # constructors and encoders may raise anything
        raise NoImagesError(
            f"{name}: no tiny model with images can be made: {error!r}"[:300]
        ) from error


@torch.no_grad()
def prompts_with_images(model, seed, images):
    """Return prompts with so many images in each row, left-padded, as a processor of the model
    would.
    """
    generator = torch.Generator().manual_seed(seed)
    accepted = inspect.signature(model.forward).parameters
    if "pixel_values" not in accepted or not hasattr(model, "get_image_features"):
        raise NoImagesError(
            f"{type(model).__name__} takes no pixel_values or has no get_image_features"
        )
    pixels = [_pixels(model, accepted, place, generator) for place in range(sum(images))]
    known = inspect.signature(model.get_image_features).parameters
    lengths = [_num_tokens(model, {k: v for k, v in own.items() if k in known}) for own in pixels]
    rows = []
    left = iter(lengths)
    for count in images:
        rows.append(_text(generator))
        for _ in range(count):
            rows[-1] += [IMAGE] * next(left) + _text(generator)
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask}
    if pixels:
        inputs |= _joined(pixels, images)
    if "mm_token_type_ids" in accepted:
        inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    if "token_type_ids" in accepted:  # PaliGemma's are 0 in all of the prompt
        sees_later = getattr(model.config.get_text_config(), "use_bidirectional_attention", False)
        inputs["token_type_ids"] = torch.zeros_like(ids) if sees_later else (ids == IMAGE).long()
    return inputs


def _text(generator):
    length = int(torch.randint(4, 9, (), generator=generator))
    return torch.randint(3, IMAGE, (length,), generator=generator).tolist()


def _pixels(model, accepted, place, generator):
    """Return the inputs of one image; those of different places have different sizes where the
    class allows it.
    """
    size = 2 if place % 2 else 1  # every second image is wider
    if "image_grid_thw" in accepted:
        vision = model.config.vision_config
        num_patches = SIDE * size  # 4 x 4, or 4 x 8
        channels = 3 * getattr(vision, "temporal_patch_size", 1) * PATCH**2
        patches = torch.rand(num_patches, channels, generator=generator)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4 * size]])}
    if "image_position_ids" in accepted:
        x, y = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy")
        positions = torch.stack((x.flatten(), y.flatten()), dim=-1)[None]
        return {
            "pixel_values": torch.rand(1, 16, 3 * PATCH**2, generator=generator),
            "image_position_ids": positions,
        }
    if "pixel_attention_mask" in accepted:
        image = torch.rand(1, 1, 3, SIDE, SIDE, generator=generator)
        return {
            "pixel_values": image,
            "pixel_attention_mask": torch.ones(1, 1, SIDE, SIDE, dtype=torch.int64),
        }
    if "image_sizes" in accepted and hasattr(model.config, "image_grid_pinpoints"):
        tiles = 1 + 2  # the whole image, and its halves side by side
        image = torch.rand(1, tiles, 3, SIDE, SIDE, generator=generator)
        return {
            "pixel_values": image,
            "image_sizes": torch.tensor([[SIDE, 2 * SIDE - 3 * (size - 1)]]),
        }
    image = torch.rand(1, 3, SIDE, SIDE, generator=generator)
    takes_sizes = "image_sizes" in inspect.signature(model.get_image_features).parameters
    return {"pixel_values": image} | (
        {"image_sizes": torch.tensor([[SIDE, SIDE]])} if takes_sizes else {}
    )


def _num_tokens(model, own):
    """Return how many places one image takes in the text."""
    found = model.get_image_features(**own, return_dict=True).pooler_output
    parts = found if isinstance(found, (list, tuple)) else [found]
    return sum(part.shape[:-1].numel() for part in parts)


def _joined(pixels, images):
    """Return the inputs of all images together, by row where the class has them so."""
    joined = {name: torch.cat([own[name] for own in pixels]) for name in pixels[0]}
    if "pixel_attention_mask" not in joined:
        return joined
    by_row = {}
    for (
        name,
        value,
    ) in (
        joined.items()
    ):  # [num_images, 1, ...] to [batch, most images, ...]; missing ones are zeros
        by_row[name] = value.new_zeros(len(images), max(images), *value.shape[2:])
        for row, own in enumerate(value[:, 0].split(list(images))):
            by_row[name][row, : len(own)] = own
    return by_row


assert max(IMAGE, VIDEO, AUDIO) < VOCAB
