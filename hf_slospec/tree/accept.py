"""Acceptance by sampling the target's token and looking for it among the children: lossless for
every logits processor and sampler.
"""

from __future__ import annotations

from collections.abc import Callable

from hf_slospec.tree.tree import ROOT, TokenTree


def accept(
    tree: TokenTree, choose: Callable[[int], int], emit: Callable[[int], int | None]
) -> list[int]:
    """Walk down the draft tree from the root, as long as a child carries the token that plain
    decoding chooses.

    Args:
        tree: the verified draft tree.
        choose: returns the target's token after a node, chosen exactly as in plain decoding.
        emit: commits a token and returns the committed one, which may differ; returns None once the
            request is finished.

    Returns:
        The accepted nodes along the path, root excluded. Unless the request finished, one token
        more is emitted than nodes are accepted; that bonus token is the root of the next tree.
    """
    node = ROOT
    accepted = list[int]()
    while True:
        token = emit(choose(node))
        if token is None:
            return accepted
        child = tree.child(node, token)
        if child is None:
            return accepted
        accepted.append(child)
        node = child
