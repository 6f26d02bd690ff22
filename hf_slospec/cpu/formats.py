"""Formats of quantised weights that are read without rounding: GGUF's types, of files that
transformers has loaded, and torchao's tensor classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.utils import cached_file

from hf_slospec.cpu.quantised import FLOAT8, GROUP, Codes
from hf_slospec.errors import UnsupportedModelError
from hf_slospec.model.loading import GGUF_FILE

SUPER = 256  # inputs of a block of GGUF's K types


def _halves(blocks: np.ndarray) -> torch.Tensor:
    """Return the two bytes at the end of an axis as fp16."""
    return torch.from_numpy(blocks.copy().view(np.float16).astype(np.float16)).squeeze(-1)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the lower nibbles of a block, then its upper ones.  [..., n] -> [..., 2 * n]"""
    return np.concatenate([packed & 15, packed >> 4], -1)


def _q8_0(blocks: np.ndarray) -> Codes:
    codes = blocks[..., 2:].view(np.int8)
    return Codes(8, _flat(codes), _halves(blocks[..., :2]))


def _q4_0(blocks: np.ndarray) -> Codes:
    return Codes(4, _flat(_nibbles(blocks[..., 2:])), _halves(blocks[..., :2]), zero=8)


def _q4_1(blocks: np.ndarray) -> Codes:
    codes = _flat(_nibbles(blocks[..., 4:]))
    return Codes(4, codes, _halves(blocks[..., :2]), minima=-_halves(blocks[..., 2:4]))


def _with_fifth(blocks: np.ndarray) -> np.ndarray:
    """Return codes of 5 bits: 4 bytes of fifth bits, then 16 bytes of nibbles."""
    fifth = np.unpackbits(blocks[..., :4], axis=-1, bitorder="little")
    codes: np.ndarray = _nibbles(blocks[..., 4:]) | fifth << 4
    return codes


def _q5_0(blocks: np.ndarray) -> Codes:
    return Codes(5, _flat(_with_fifth(blocks[..., 2:])), _halves(blocks[..., :2]), zero=16)


def _q5_1(blocks: np.ndarray) -> Codes:
    codes = _flat(_with_fifth(blocks[..., 4:]))
    return Codes(5, codes, _halves(blocks[..., :2]), minima=-_halves(blocks[..., 2:4]))


def _six_bit_steps(packed: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 8 steps of scales and of minima that 12 bytes of a block hold in 6 bits each."""
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], -1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], -1)
    return _flat(scales.view(np.int8)), _flat(minima.view(np.int8))


def _of_k_type(bits: int, blocks: np.ndarray, codes: np.ndarray) -> Codes:
    steps, min_steps = _six_bit_steps(blocks[..., 4:16])
    return Codes(
        bits,
        _flat(codes),
        _halves(blocks[..., :2]),
        shared=SUPER // GROUP,
        steps=steps,
        minima=_halves(blocks[..., 2:4]),
        min_steps=min_steps,
    )


def _q4_k(blocks: np.ndarray) -> Codes:
    nibbles = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32))
    return _of_k_type(4, blocks, nibbles)


def _q5_k(blocks: np.ndarray) -> Codes:
    nibbles = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32))
    # Bit i of a byte belongs to the i-th 32 inputs.
    fifth = blocks[..., 16:48, None] >> np.arange(8, dtype=np.uint8) & 1
    codes = nibbles.reshape(*blocks.shape[:-1], 8, 32) | np.swapaxes(fifth, -1, -2) << 4
    return _of_k_type(5, blocks, codes)


def _q6_k(blocks: np.ndarray) -> Codes:
    shape = blocks.shape[:-1]
    low = _nibbles(blocks[..., :128].reshape(*shape, 2, 64))  # halves of 128 inputs
    packed = blocks[..., 128:192].reshape(*shape, 2, 1, 32)
    high = packed >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3
    codes = low | high.reshape(*shape, 2, 128) << 4
    return Codes(
        6,
        _flat(codes),
        _halves(blocks[..., 208:]),
        zero=32,
        span=16,
        shared=SUPER // 16,
        steps=_flat(blocks[..., 192:208].view(np.int8)),
    )


def _flat(values: np.ndarray) -> torch.Tensor:
    """Return [outputs, blocks, ...] as a tensor [outputs, n]."""
    return torch.from_numpy(np.ascontiguousarray(values.reshape(len(values), -1)))


# Name of a GGUF type -> bytes of a block, and what reads [outputs, blocks, bytes] uint8.
GGUF_TYPES: dict[str, tuple[int, Callable[[np.ndarray], Codes]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}


def codes_of_gguf(name: str, data: Any) -> Codes:
    """Return a weight of a GGUF file as it is.

    Args:
        name: the GGUF type, such as "Q4_K".
        data: [outputs, bytes] uint8, as ``gguf.GGUFReader`` returns it.

    Raises:
        UnsupportedModelError: the type is not among ``GGUF_TYPES``.
    """
    if name not in GGUF_TYPES:
        raise UnsupportedModelError(
            f"weights of the GGUF type {name} are not supported; use one of {', '.join(GGUF_TYPES)}"
        )
    num_bytes, read = GGUF_TYPES[name]
    return read(np.asarray(data).reshape(len(data), -1, num_bytes))


def gguf_file(model: Any) -> str | None:
    """Return the path of the GGUF file that a model was loaded from; None if that is not known,
    as with transformers before 5.24, and with architectures that its newer loader reads.
    """
    if (known := getattr(model, GGUF_FILE, None)) is not None:
        return str(known)
    quantizer = getattr(model, "hf_quantizer", None)
    name = getattr(getattr(quantizer, "quantization_config", None), "gguf_file", None)
    if name is None:
        return None
    try:
        path: str | None = cached_file(model.config.name_or_path, name, local_files_only=True)
    except OSError:  # the file was moved
        return None
    return path


def gguf_weights(model: Any, path: str) -> dict[str, Callable[[], Codes]]:
    """Return what reads the quantised weights of a GGUF file, by name of the model's parameter.

    Weights that transformers has not only reordered are left out.
    """
    try:
        from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:  # transformers before 5.24
        return _of_file(model, path)
    metadata, _ = read_gguf_metadata(path)
    if is_gguf_arch_supported(metadata["general.architecture"]):
        return _of_header(model, GgufHeader.from_file(path))
    return _of_file(model, path)


def _of_header(model: Any, header: Any) -> dict[str, Callable[[], Codes]]:
    """Read weights of architectures that transformers' newer loader reads."""
    from transformers.core_model_loading import WeightConverter, rename_source_key
    from transformers.integrations.gguf.dequant import GGML_NAME
    from transformers.integrations.gguf.reader import load_gguf_state_dict
    from transformers.integrations.gguf.utils import get_gguf_conversion_mapping, get_gguf_plan

    mapping = get_gguf_conversion_mapping(header.architecture, model.config)
    _, packable, permuted = get_gguf_plan(header, mapping)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings: list[Any] = [each for each in mapping if not isinstance(each, WeightConverter)]
    found = dict[str, Callable[[], Codes]]()
    for stored, tensor in load_gguf_state_dict(header).items():
        name, pattern = rename_source_key(stored, renamings, converters)
        kind = GGML_NAME.get(tensor.ggml_type, "")
        if name not in packable or name in permuted or kind not in GGUF_TYPES:
            continue
        converter = next((each for each in converters if pattern in each.source_patterns), None)
        if converter is None or len(converter.source_patterns) == 1:
            found[name] = functools.partial(_converted, kind, tensor, converter)
    return found


def _converted(kind: str, tensor: Any, converter: Any) -> Codes:
    """Return a weight of a GGUF file with its rows in the model's order."""
    blocks = tensor[...]
    for operation in [] if converter is None else converter.operations:
        patterns = converter.source_patterns, converter.target_patterns
        (blocks,) = operation.convert({"": blocks}, *patterns).values()
    return codes_of_gguf(kind, blocks.numpy())


def _of_file(model: Any, path: str) -> dict[str, Callable[[], Codes]]:
    """Read weights of architectures that transformers' older loader reads."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as loader

    reader = gguf.GGUFReader(path)
    (architecture,) = loader.read_field(reader, "general.architecture")
    config = loader.load_gguf_checkpoint(path)["config"]
    new_processor: Any = loader.TENSOR_PROCESSORS.get(architecture, loader.TensorProcessor)
    processor = new_processor(config=config)
    names = loader.get_gguf_hf_weights_map(model, processor)
    found = dict[str, Callable[[], Codes]]()
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        if kind in GGUF_TYPES and tensor.data.ndim == 2 and tensor.name in names:
            rows = np.arange(len(tensor.data), dtype=np.float32)[:, None]
            try:  # what happens to the rows of the weight
                rows = processor.process(rows, tensor.name, tensor_key_mapping=names).weights
            except (ValueError, KeyError):  # it is not only reordered
                continue
            if rows.shape == (len(tensor.data), 1):
                ordered = functools.partial(_ordered, kind, tensor.data, rows[:, 0])
                found[names[tensor.name]] = ordered
    return found


def _ordered(kind: str, blocks: np.ndarray, rows: np.ndarray) -> Codes:
    return codes_of_gguf(kind, blocks[rows.astype(np.int64)])


def codes_of_torchao(weight: Any) -> Codes | None:
    """Return a weight of torchao's classes for weights in int8, in 4 bits that are stored as int8,
    or in float8_e4m3fn, as it is; None for other weights, and for classes that quantise activations.
    """
    if type(weight).__module__.partition(".")[0] != "torchao" or weight.ndim != 2:
        return None
    activations = ("act_quant_kwargs", "activation_quantization", "act_pre_scale")
    if any(getattr(weight, name, None) is not None for name in activations):
        return None
    name = type(weight).__name__
    if name not in ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor"):
        return None
    outputs, inputs = weight.shape
    rows, columns = weight.block_size
    codes = weight.qdata
    if rows not in (1, outputs) or columns % GROUP or inputs % columns:
        return None
    scales = weight.scale.float().expand(outputs, inputs // columns)
    shared = columns // GROUP
    if name == "Float8Tensor":
        is_known = codes.dtype == torch.float8_e4m3fn
        return Codes(FLOAT8, codes, scales, shared=shared) if is_known else None
    zeros = weight.zero_point
    minima = None if zeros is None or not zeros.any() else scales * zeros.float()
    if weight.qdata.min() >= -8 and weight.qdata.max() <= 7:
        return Codes(4, (codes + 8).to(torch.uint8), scales, zero=8, shared=shared, minima=minima)
    return Codes(8, codes, scales, shared=shared, minima=minima)
