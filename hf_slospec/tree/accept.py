"""Sample-then-match acceptance: lossless for every logits processor and sampler."""

from __future__ import annotations

from collections.abc import Callable

from hf_slospec.tree.tree import ROOT, TokenTree


def accept(
    tree: TokenTree, choose: Callable[[int], int], emit: Callable[[int], int | None]
) -> list[int]:
    """Walk from the root down the draft tree as long as a child holds the token that plain decoding
    chooses.

    Args:
        tree: the verified draft tree.
        choose: returns the target's token after a node, chosen exactly as in plain decoding.
        emit: commits one token and returns it, or the token that replaces it; None once the request
            is finished.

    Returns:
        The accepted nodes along the path, without the root. One more token is emitted than nodes
        are accepted, the bonus token, which becomes the next root.
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
