"""Models whose quantised weights are packed in place, and models that are quantised on request."""

from __future__ import annotations

import functools
import logging
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import nn

from hf_slospec.config import SLOSpecConfig
from hf_slospec.cpu import operators
from hf_slospec.cpu.formats import codes_of_torchao, gguf_file, gguf_weights
from hf_slospec.cpu.quantised import DTYPES, GROUP, NAMES, Codes, PackedMatrix, quantise
from hf_slospec.cpu.quantised_weight import QuantisedWeight
from hf_slospec.errors import InvalidFileError, UnsupportedOptionError
from hf_slospec.model.checksum import is_packed
from hf_slospec.model.host_memory import return_freed_memory
from hf_slospec.model.linear_overrides import weight_names
from hf_slospec.model.version import formats_not_traced

logger = logging.getLogger(__name__)

BITS = {"int8": 8, "int4": 4}  # by SLOSpecConfig(weights=...)
ROWS = 4096  # number of rows that are compared at a time
# By the id of a weight: the weight, and what packs it; None: it has been changed, and stays.
Sources = dict[int, tuple[Any, Callable[[], PackedMatrix | None]]]


_warned = WeakSet[nn.Module]()  # models whose formats have been warned of
# Dequantised weights in state dicts by the id of the matrix: tied layers have one of them, too.
_dequantised = WeakValueDictionary[int, torch.Tensor]()


def pack_weights(model: nn.Module, config: SLOSpecConfig) -> None:
    """Replace weights of linear layers and embeddings in place by weights that stay packed.

    Weights of GGUF files and of torchao's classes keep their values. With ``config.weights`` of
    "int8" or "int4", the weights of linear layers are quantised, and embeddings that share them.

    Raises:
        InvalidFileError: ``config.weights`` is a file that is missing, cannot be read, or has no
            weight of the model.
        UnsupportedOptionError: ``config.weights`` is not "auto", and cannot be had for this model,
            with these settings, or on this system.
    """
    asked = config.weights
    if asked == "keep":
        return
    if asked in BITS:
        sources = _quantising(model, BITS[asked])
        _warn_of_experts(model, asked)
    else:
        sources = _stored(model, gguf_file(model) if asked == "auto" else asked)
        if config.compile and config.exact is None:
            _warn_of_others(model, sources)
    if sources:
        if (why_not := _why_not(config)) is not None:
            if asked != "auto":
                raise UnsupportedOptionError(f"weights={asked!r} is not possible: {why_not}")
            return
        _replace(model, sources)
    has_packed = any(map(is_packed, model.parameters()))
    if asked in BITS and not has_packed:
        logger.warning(
            "weights=%r quantises no layer of %s: it has no linear layers of %d inputs or a multiple "
            "in fp32, fp16 or bf16",
            *(asked, type(model).__name__, GROUP),
        )
    if asked.endswith(".gguf") and not has_packed:
        raise InvalidFileError(
            f"weights={asked!r}: none of the model's weights are those of the file, from which the "
            "model must have been loaded, by from_pretrained(folder, gguf_file=...)"
        )


def _why_not(config: SLOSpecConfig) -> str | None:
    """Return why there are no kernels of quantised weights; None once they are loaded."""
    if config.exact is not None:
        return f"their products have other bits than exact={config.exact!r} needs"
    if (why_not := operators.why_unsupported()) is not None:
        return why_not
    try:
        if not operators.library_path().exists():
            logger.info("building the kernels of quantised weights, about 40 s, once")
        operators.build()
        operators.load()
    except (OSError, RuntimeError) as error:
        logger.warning("there are no kernels of quantised weights: %s", error)
        return str(error)
    return None


def _weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the names, layers and weights of linear layers and embeddings on a CPU."""
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight")
        is_packable = type(layer) is nn.Linear or isinstance(layer, nn.Embedding)
        if is_packable and weight is not None and weight.device.type == "cpu":
            yield f"{name}.weight", layer, weight


def _stored(model: nn.Module, file: str | None) -> Sources:
    """Return the weights of torchao's classes, and those of a GGUF file.

    Raises:
        InvalidFileError: there is no such file, or it cannot be read.
    """
    if file is not None and not Path(file).is_file():
        raise InvalidFileError(f"weights={file!r}: there is no such file")
    try:
        of_file = {} if file is None else gguf_weights(model, file)
    except (ValueError, KeyError, struct.error) as error:  # from the libraries that read it
        raise InvalidFileError(f"weights={file!r} cannot be read: {error}") from error
    found: Sources = {}
    for name, _, weight in _weights(model):
        if is_packed(weight) or id(weight) in found:
            continue
        if type(weight) is nn.Parameter:
            if name in of_file:
                found[id(weight)] = weight, functools.partial(_unchanged, weight, of_file[name])
        elif (read := codes_of_torchao(weight)) is not None:
            found[id(weight)] = weight, functools.partial(_packed, read)
    return found


def _warn_of_others(model: nn.Module, sources: Sources) -> None:
    """Log a warning, once, of weights on a CPU in formats that are neither packed nor compiled."""
    weights = [each for each in model.parameters() if each.device.type == "cpu"]
    others = formats_not_traced(each for each in weights if id(each) not in sources)
    if others is not None and model not in _warned:
        _warned.add(model)
        logger.warning(
            "%s has formats of weights that are not compiled: %s. Its forwards are eager, and slow. "
            "Compiled are GGUF files (from_pretrained(folder, gguf_file=...)), torchao's configs for "
            "weights alone in int8, 4 bits and float8, and weights='int8' or 'int4' for a model that "
            "is loaded without quantisation; compile=False turns this warning off",
            *(type(model).__name__, others),
        )


def _packed(read: Callable[..., Any], *arguments: Any) -> PackedMatrix:
    return PackedMatrix(read(*arguments))


def _unchanged(weight: torch.Tensor, read: Callable[[], Codes]) -> PackedMatrix | None:
    """Return a packed weight; None if it has been changed since it was read from its file."""
    matrix = _packed(read)
    if weight.shape != (matrix.outputs, matrix.inputs):
        return None
    tolerance = 4 * torch.finfo(weight.dtype).eps
    for begin in range(0, len(weight), ROWS):
        part = weight.detach()[begin : begin + ROWS].float()
        stored = matrix.rows(torch.arange(begin, begin + len(part), device="cpu"))
        if not torch.linalg.norm(stored - part) <= tolerance * torch.linalg.norm(part):
            return None
    return matrix


def _quantising(model: nn.Module, bits: int) -> Sources:
    """Return the weights of linear layers that are quantised to ``bits`` bits.

    Raises:
        UnsupportedOptionError: a weight is quantised to other codes.
    """
    found: Sources = {}
    for name, layer, weight in _weights(model):
        is_other = type(weight) not in (nn.Parameter, QuantisedWeight)
        if is_other or (isinstance(weight, QuantisedWeight) and weight.matrix.bits != bits):
            raise UnsupportedOptionError(
                f"{name} is quantised already, so that it cannot be quantised to {bits} bits; "
                "load the model again without quantised weights, or leave out weights="
            )
        is_dense = type(weight) is nn.Parameter and weight.dtype in DTYPES
        if type(layer) is nn.Linear and is_dense and weight.shape[1] % GROUP == 0:
            found[id(weight)] = weight, functools.partial(_packed, quantise, weight, bits)
    return found


def _warn_of_experts(model: nn.Module, asked: str) -> None:
    """Log a warning, once, of experts whose weights stay dense."""
    held = {name: each for name, each in model.named_modules() if len(weight_names(each)) > 1}
    if not held or model in _warned:
        return
    _warned.add(model)
    num_dense = sum(weight.numel() for each in held.values() for weight in each.parameters())
    logger.warning(
        "weights=%r quantises linear layers only: %d modules of experts of %s, such as %s, stay "
        "dense, %.0f %% of its weights",
        *(asked, len(held), type(model).__name__, next(iter(held))),
        100.0 * num_dense / sum(weight.numel() for weight in model.parameters()),
    )


def _with_dense(
    layer: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Set a layer's weight in its state dict to plain values, which can be saved."""
    weight = state_dict.get(name := f"{prefix}weight")
    if isinstance(weight, QuantisedWeight):
        key = weight.matrix.id
        dense = _dequantised.get(key)
        if dense is None:
            dense = _dequantised[key] = weight.matrix.dequantised().to(weight.dtype)
        state_dict[name] = dense


def _replace(model: nn.Module, sources: Sources) -> None:
    """Replace weights by packed ones, one at a time, so that little memory is needed besides."""
    places = dict[int, list[nn.Module]]()
    for _, layer, weight in _weights(model):
        places.setdefault(id(weight), []).append(layer)
    kinds = Counter[str]()
    num_bytes = 0
    for key in list(sources):
        weight, pack = sources.pop(key)  # the last references to the dense weight but the layers'
        with torch.no_grad(), torch.inference_mode(False):
            if (matrix := pack()) is None:
                continue
            packed = nn.Parameter(QuantisedWeight(matrix, weight.dtype), requires_grad=False)
        for layer in places[key]:
            layer._parameters["weight"] = packed
            layer.register_state_dict_post_hook(_with_dense)
        kinds[NAMES[matrix.bits]] += 1
        num_bytes += matrix.num_bytes
        del weight, pack
    if kinds:
        return_freed_memory()
        parts = ", ".join(f"{number} in {name}" for name, number in kinds.items())
        name = type(model).__name__
        logger.info("packed weights of %s: %s; %.0f MiB", name, parts, num_bytes / 2**20)
