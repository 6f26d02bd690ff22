"""Trial of hidden states: a packed forward must return those of a plain one."""

from __future__ import annotations

import torch

from hf_slospec.models.inspection.properties import cannot_be_packed, evaluating, refused_if_it_fails
from hf_slospec.models.packed.model import PackedModel
from hf_slospec.models.packed.tree_mask import chain

LENGTH = 6  # tokens of the trial's prompt
TOLERANCE = 0.1  # relative error; the states of another layer or token differ by more


def check_features(packed: PackedModel, layers: tuple[int, ...]) -> None:
    """Raise UnsupportedModelError unless a packed forward returns the model's hidden states after these layers.

    The caller must hold the model's lock.
    """
    model = packed.model
    # From all over the vocabulary: special tokens may have states so large that half precision says little of others.
    token_ids = [packed.vocab_size * place // (LENGTH + 1) for place in range(1, LENGTH + 1)]
    if packed.attends_to_encoder:
        raise cannot_be_packed(
            model, "hidden states of encoder-decoders are not read; draft with an assistant_model or by prompt lookup"
        )
    ids = torch.tensor([token_ids], device=packed.device)
    with evaluating(model), refused_if_it_fails(model), torch.no_grad():
        plain = model(input_ids=ids, use_cache=False, output_hidden_states=True, return_dict=True).hidden_states
        if not plain or max(layers) >= len(plain):
            raise cannot_be_packed(
                model, f"it has {len(plain or ())} hidden states and the drafter reads number {max(layers)}"
            )
        cache = packed.kv_cache
        with cache.temporary([LENGTH]) as (sequence,):
            parts = [chain(packed, sequence, token_ids)]
            ours = packed.outputs(cache.pool, parts, torch.empty(0, dtype=torch.int64, device="cpu"), layers).features
        expected = torch.cat([plain[layer][0].to(packed.device) for layer in layers], dim=-1)
        assert ours is not None
        error = float((ours.double() - expected.double()).norm() / expected.double().norm())
    if not error <= TOLERANCE:
        raise cannot_be_packed(model, f"its hidden states differ by {error:.1%} from those of its own forward")
