"""Index of the prompt prefixes that replicas have processed, for cache-aware routing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK = 32  # tokens; prompts are compared by whole blocks
MAX_BLOCKS = 2**16  # blocks of all prompts together; the least recently used are dropped


class PrefixIndex:
    """Approximate record of which replicas hold the K/V of which prefixes.

    A block's key is a hash of its tokens and of all before it, so prompts share the entries of their common prefix.
    A replica may have dropped K/V that is recorded here.
    """

    def __init__(self, block: int = BLOCK, max_blocks: int = MAX_BLOCKS):
        self.block, self.max_blocks = block, max_blocks
        self._holders: OrderedDict[int, set[str]] = OrderedDict()  # replicas by key, least recently used first

    def record(self, replica: str, prompt: Sequence[int], salt: str = "") -> None:
        """Record that a replica processes a prompt; prompts of different salts share nothing."""
        for key in self._keys(prompt, salt):
            self._holders.setdefault(key, set()).add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self.max_blocks:
            self._holders.popitem(last=False)

    def num_known(self, replicas: Sequence[str], prompt: Sequence[int], salt: str = "") -> list[int]:
        """Return for each replica the length in tokens of the prompt's prefix that it has processed."""
        known, alive = dict.fromkeys(replicas, 0), set(replicas)
        for num_blocks, key in enumerate(self._keys(prompt, salt), 1):
            alive &= self._holders.get(key, set())
            if not alive:
                break
            known |= dict.fromkeys(alive, num_blocks * self.block)
        return [known[replica] for replica in replicas]

    def forget(self, replica: str) -> None:
        """Drop the entries of a replica that has stopped."""
        for key, holders in list(self._holders.items()):
            holders.discard(replica)
            if not holders:
                del self._holders[key]

    def _keys(self, prompt: Sequence[int], salt: str) -> Iterator[int]:
        key = hash(salt)
        for begin in range(0, len(prompt) - self.block + 1, self.block):
            key = hash((key, *prompt[begin : begin + self.block]))
            yield key
