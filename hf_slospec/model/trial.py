"""Trial of a model: the logits of a small packed batch with two draft trees must agree with logits
of the model's own forward. Also small trials of padding, token types and hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, EncoderDecoderCache

from hf_slospec.model.batch import CachedSequence
from hf_slospec.model.checksum import PLAIN
from hf_slospec.model.loading import listed, not_finite
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.prefilled_prompts import cached_tensors, own_cache, sees_later_tokens
from hf_slospec.model.properties import (
    cache_option,
    cannot_be_packed,
    evaluating,
    given_position_ids,
    refused_if_it_fails,
    relative_error,
    takes_position_ids,
    tolerance_in,
    trained_len,
)
from hf_slospec.model.tree_mask import chain, chain_and_tree
from hf_slospec.tree.tree import TokenTree

# Accepted error, as a multiple of the error between plain forwards with different batch sizes. It
# is the limit if it exceeds the tolerance (int8, TF32).
NOISE = 4.0
# Number of random prompts if the first one shows errors; the median counts. Errors by tokens that
# are routed to other experts vary with the prompt, while a fault does not.
DRAWS = 5
# Prompt lengths of the two sequences in the packed batch; the second one is long, for layers that
# compute differently depending on the length of a forward.
PROMPTS = (5, 130)
# Parent of each node of the two trees: the first tree branches at its root, the second is a chain.
PARENTS = ((-1, 0, 0, 1), (-1, 0, 1))
PADDING = 3  # number of masked tokens in the trials of padding and gaps
GAP_AT = 2  # number of tokens before a gap
LEAVES = ((0, 2), (0, 3), (1, 2))  # (sequence, node); the paths to them contain all nodes
ENCODED = 6  # length of the encoder's outputs for each sequence


def check_by_trial(packed: PackedModel) -> None:
    """Raise UnsupportedModelError unless the logits of a packed batch with two draft trees agree
    with those of plain forwards.
    """
    with evaluating(packed.model), refused_if_it_fails(packed.model), torch.no_grad():
        errors = _errors(packed, 0)
        if bool((errors <= tolerance(packed)).all()):
            return
        draws = [errors, *(_errors(packed, draw) for draw in range(1, DRAWS))]
        errors = torch.stack(draws).median(0).values
        error = float(errors.nan_to_num(nan=torch.inf).max())
        if error == torch.inf and (names := not_finite(packed.model.named_parameters())):
            raise cannot_be_packed(
                packed.model, f"it holds NaN or infinite weights, in {listed(names)}"
            )
        if error > max(tolerance(packed), NOISE * _noise(packed)):
            raise cannot_be_packed(
                packed.model,
                f"on a trial tree its logits differed from those of its own forward (by {error:.1%}), so its layers do "
                "something that a packed forward does not do",
            )


def counts_padding(packed: PackedModel) -> bool:
    """Return whether left padding, masked as in stock ``generate``, changes what the model
    computes.

    It does if a layer asks the cache for its length. Otherwise it does not in models that take
    position ids, while some other models count padding as text.
    """
    model = packed.model
    # The effect of padding may begin after thousands of tokens, which a short trial would miss.
    if any(layer.counts_tokens for layer in packed.layers):
        return True
    return not takes_position_ids(model) and _counts_masked(packed, 0)


def counts_gaps(packed: PackedModel) -> bool:
    """Return whether masked tokens inside a prompt change what the model computes for the other
    tokens; False for models that take position ids.

    For example, MPT computes ALiBi from the indices of keys, so it counts masked tokens.
    """
    return not takes_position_ids(packed.model) and _counts_masked(packed, GAP_AT)


def _counts_masked(packed: PackedModel, begin: int) -> bool:
    """Return whether inserting masked tokens at index ``begin`` of a prompt changes the logits of
    its last token.
    """
    model = packed.model
    prompt = _random_prompt(packed)
    ids = torch.tensor(
        [prompt[:begin] + [prompt[0]] * PADDING + prompt[begin:]], device=packed.device
    )
    indices = torch.arange(ids.shape[1], device=packed.device)
    mask = ((indices < begin) | (indices >= begin + PADDING))[None].long()
    with evaluating(model), torch.no_grad():
        padded = _logits(packed, [0], input_ids=ids, attention_mask=mask)[0, -1:]
        error = relative_error(padded, _plain(packed, [prompt])[0][-1:])
    return not float(error) <= max(tolerance(packed), NOISE * _noise(packed))


def ignores_zero_types(packed: PackedModel) -> bool:
    """Return whether passing ``token_type_ids`` of zeros has no effect on the model.

    It has none in BERT, where zeros are the default. GPT-2 adds the embedding of token 0.
    """
    ids = torch.tensor([_random_prompt(packed)], device=packed.device)
    with evaluating(packed.model), torch.no_grad():
        plain = _logits(packed, [0], input_ids=ids)
        return torch.equal(
            plain, _logits(packed, [0], input_ids=ids, token_type_ids=torch.zeros_like(ids))
        )


def tolerance(packed: PackedModel) -> float:
    """Return the largest relative error of logits that is accepted as rounding."""
    dtypes = {stored.dtype for layer in packed.layers for stored in layer.shape.stored}
    # No layer caches K and V if all keep states. States are fp32 whatever the weights are, so the
    # dtype of the weights is taken.
    dtypes = dtypes or {packed.model.get_input_embeddings().weight.dtype}
    return tolerance_in(dtypes)


def _errors(packed: PackedModel, draw: int) -> torch.Tensor:
    """Return the relative error of the logits of all nodes on the paths to :data:`LEAVES`.  ->
    [num_path_nodes] f64
    """
    lengths = [min(length, _max_len(packed)) for length in PROMPTS]
    tokens = iter(random_tokens(packed, draw, sum(lengths) + sum(map(len, PARENTS))))
    prompts = [[next(tokens) for _ in range(length)] for length in lengths]
    trees = [
        tree_of(prompt[-1], parents, tokens)
        for prompt, parents in zip(prompts, PARENTS, strict=True)
    ]
    encoder = _encoder_outputs(packed, range(len(prompts)))

    capacities = [len(prompt) + tree.num_nodes for prompt, tree in zip(prompts, trees, strict=True)]
    with packed.kv_cache.temporary(capacities) as sequences:
        pairs = list(zip(sequences, prompts, strict=True))
        for sequence, prompt in pairs:
            sequence.prompt_len = len(prompt)
        if encoder is not None:
            encodings, _ = packed.family.encode(packed.model, encoder)
            for sequence, encoded in zip(sequences, encodings, strict=True):
                sequence.encoded = encoded
        if sees_later_tokens(packed.model):
            for sequence, prompt in pairs:
                load_plain(packed, sequence, prompt, len(prompt) - 1)
        else:
            parts = [chain(packed, sequence, prompt[:-1]) for sequence, prompt in pairs]
            packed.forward(packed.kv_cache.pool, parts, torch.tensor([0], device="cpu"))
            for sequence, prompt in pairs:
                sequence.length = len(prompt) - 1
        ours = tree_logits(packed, sequences, trees)
    errors = []
    for index, leaf in LEAVES:
        path = np.flatnonzero(trees[index].ancestor_mask()[leaf])
        tokens_of_path = trees[index].tokens[path[1:]].tolist()
        row = None if encoder is None else encoder[index : index + 1]
        plain, _ = plain_steps(packed, prompts[index], tokens_of_path, row)
        errors.append(relative_error(ours[index][path], plain[-len(path) :]))
    return torch.cat(errors)


def tree_logits(
    packed: PackedModel, sequences: Sequence[CachedSequence], trees: Sequence[TokenTree]
) -> Sequence[torch.Tensor]:
    """Return the logits of trees whose roots follow the cached tokens of sequences, computed by one
    packed forward.

    Returns:
        [num_nodes, vocab] for each tree, on the host.
    """
    pairs = zip(sequences, trees, strict=True)
    parts = [chain_and_tree(packed, each, tree.tokens[:1].tolist(), tree) for each, tree in pairs]
    num_nodes = [tree.num_nodes for tree in trees]
    rows = torch.arange(sum(num_nodes), device="cpu")
    logits = packed.forward(packed.kv_cache.pool, parts, rows).cpu()
    per_tree: Sequence[torch.Tensor] = logits.split(num_nodes)
    return per_tree


def _noise(packed: PackedModel) -> float:
    """Return the relative error between two plain forwards of a prompt: alone, and in a batch of 8
    copies.
    """
    prompt = _random_prompt(packed)
    return float(relative_error(_plain(packed, [prompt] * 8)[0], _plain(packed, [prompt])[0]).max())


def _random_prompt(packed: PackedModel) -> list[int]:
    return random_tokens(packed, 0, PROMPTS[0])


def random_tokens(packed: PackedModel, draw: int, number: int) -> list[int]:
    """Return random tokens whose embeddings are finite, as logits of other tokens cannot be
    compared.
    """
    token_ids = np.random.default_rng(draw).permutation(packed.vocab_size)
    token_ids = np.resize(token_ids, max(2 * number, len(token_ids)))
    weight = packed.model.get_input_embeddings().weight
    if type(weight) in PLAIN and not weight.is_meta:
        rows = weight.detach()[torch.from_numpy(token_ids).to(weight.device)]
        is_finite = rows.isfinite().all(-1).cpu().numpy()
        token_ids = token_ids[is_finite] if is_finite.any() else token_ids
    tokens: list[int] = np.resize(token_ids, number).tolist()
    return tokens


def _max_len(packed: PackedModel) -> int:
    """Return the maximum number of tokens of the trial's prompts."""
    limits = trained_len(packed.model), packed.max_positions, packed.num_selected, max(PROMPTS) + 8
    return max(1, min(limit for limit in limits if limit is not None) - 8)


def _encoder_outputs(packed: PackedModel, sequences: Sequence[int]) -> torch.Tensor | None:
    """Return random encoder outputs for these sequences, [num_sequences, length, hidden]; None if
    the model has no encoder.
    """
    if not packed.family.attends_to_encoder:
        return None
    hidden = packed.model.config.get_text_config().hidden_size
    random = np.random.default_rng(0).standard_normal((max(sequences) + 1, ENCODED, hidden))
    return torch.from_numpy(random[list(sequences)]).to(packed.model.get_input_embeddings().weight)


def _logits(packed: PackedModel, sequences: Sequence[int], **options: torch.Tensor) -> torch.Tensor:
    """Run a plain forward, and return its logits, [batch, length, vocab].

    Args:
        packed: the model.
        sequences: indices of the trial's sequences that the rows belong to; they select encoder
            outputs.
        options: arguments of the model's forward.
    """
    arguments: dict[str, Any] = options | {"use_cache": False}
    if (encoder := _encoder_outputs(packed, sequences)) is not None:
        arguments = packed.family.decoder_arguments(packed.model, arguments, encoder)
    logits: torch.Tensor = packed.model(**arguments).logits
    return logits.cpu()


def _plain(packed: PackedModel, token_ids: list[list[int]]) -> torch.Tensor:
    """Return the logits after each token of sequences with equal lengths, computed by one plain
    forward.  -> [rows, length, vocab]
    """
    input_ids = torch.tensor(token_ids, device=packed.device)
    options = given_position_ids(
        packed.model, torch.arange(input_ids.shape[1], device=packed.device)[None]
    )
    return _logits(packed, [0] * len(token_ids), input_ids=input_ids, **options)


def plain_steps(
    packed: PackedModel, prompt: list[int], tokens: list[int], encoder: torch.Tensor | None = None
) -> tuple[torch.Tensor, Any]:
    """Prefill a prompt and decode ``tokens`` one by one, by the model's own forward as in
    ``generate``.

    Args:
        packed: the model.
        prompt: tokens that are prefilled.
        tokens: tokens that are decoded.
        encoder: encoder outputs for the sequence, [1, length, hidden]; None without an encoder.

    Returns:
        Logits after the prompt and after each of ``tokens``, [len(tokens) + 1, vocab], and the
            transformers cache with the K/V of all tokens.
    """
    cache: Any = own_cache(packed.model)
    if encoder is not None:
        cache = EncoderDecoderCache(cache, DynamicCache())
    logits = list[torch.Tensor]()
    begin = 0
    for piece in (prompt, *([token] for token in tokens)):
        input_ids = torch.tensor([piece], device=packed.device)
        options: dict[str, Any] = given_position_ids(
            packed.model, torch.arange(begin, begin + len(piece), device=packed.device)[None]
        )
        options |= dict(input_ids=input_ids, use_cache=True, **cache_option(cache, packed.model))
        if encoder is not None:
            options = packed.family.decoder_arguments(packed.model, options, encoder)
        output = packed.model(**options)
        logits.append(output.logits[0, -1].cpu())
        begin += len(piece)
    return torch.stack(logits), cache


def tree_of(root: int, parents: Sequence[int], tokens: Iterator[int]) -> TokenTree:
    """Return a draft tree.

    Args:
        root: token of the root.
        parents: parent of each node; -1 for the root.
        tokens: tokens of the other nodes, taken from this iterator.
    """
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    nodes = [root, *(next(tokens) for _ in parents[1:])]
    return TokenTree(np.array(nodes), np.array(parents), np.array(depths), 0.5 ** np.array(depths))


LENGTH = 6  # number of tokens in the trial of hidden states
# Largest accepted relative error of hidden states; those of another layer or token differ by more.
FEATURES_TOLERANCE = 0.1


def check_features(packed: PackedModel, layers: tuple[int, ...]) -> None:
    """Raise UnsupportedModelError unless the hidden states of a packed forward after these layers
    agree with the model's own forward.

    The caller must hold the model's lock.
    """
    model = packed.model
    # Spread over the vocabulary: special tokens may have hidden states so large that, in half
    # precision, their errors hide those of other tokens.
    token_ids = [packed.vocab_size * place // (LENGTH + 1) for place in range(1, LENGTH + 1)]
    if packed.family.attends_to_encoder:
        raise cannot_be_packed(
            model,
            "hidden states of encoder-decoders are not read; draft with an assistant_model or by prompt lookup",
        )
    ids = torch.tensor([token_ids], device=packed.device)
    with evaluating(model), refused_if_it_fails(model), torch.no_grad():
        plain = model(
            input_ids=ids, use_cache=False, output_hidden_states=True, return_dict=True
        ).hidden_states
        if not plain or max(layers) >= len(plain):
            raise cannot_be_packed(
                model,
                f"it has {len(plain or ())} hidden states and the drafter reads number {max(layers)}",
            )
        cache = packed.kv_cache
        with cache.temporary([LENGTH]) as (sequence,):
            parts = [chain(packed, sequence, token_ids)]
            ours = packed.outputs(
                cache.pool, parts, torch.empty(0, dtype=torch.int64, device="cpu"), layers
            ).features
        expected = torch.cat([plain[layer][0].to(packed.device) for layer in layers], dim=-1)
        assert ours is not None
        error = float((ours.double() - expected.double()).norm() / expected.double().norm())
    if not error <= FEATURES_TOLERANCE:
        raise cannot_be_packed(
            model, f"its hidden states differ by {error:.1%} from those of its own forward"
        )


def load_plain(
    packed: PackedModel, sequence: CachedSequence, prompt: list[int], length: int
) -> None:
    """Write the K/V of the first ``length`` tokens of a prompt to a sequence, computed by the
    model's own forward over the whole prompt.
    """
    _, cache = plain_steps(packed, prompt, [])
    columns = torch.arange(length, device="cpu")
    packed.kv_cache.write(sequence, cached_tensors(cache, 0, columns, len(prompt)), length)
    sequence.length = length
