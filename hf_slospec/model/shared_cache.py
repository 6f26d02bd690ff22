"""The K/V cache that all users of a model share, and its pool while it has no user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import ref

from hf_slospec.forks import Lock, reset_in_children
from hf_slospec.model.batch import LayerShape
from hf_slospec.model.kv_cache import KVCache, KVPool
from hf_slospec.model.memory import holders_of_idle_memory
from hf_slospec.model.paths import ForwardPath


class SharedCache:
    """Holder of a model's cache, which is freed with the last reference to it."""

    def __init__(self, layout: Sequence[LayerShape], paths: Sequence[ForwardPath]):
        """Begin without a cache.

        Args:
            layout: shapes of the layers' K and V.
            paths: forward paths that use the pools.
        """
        self._layout = layout
        self._paths = paths
        self.forget()
        reset_in_children(self)

    def reset_after_fork(self) -> None:
        """Begin with an empty cache: the threads that use it stayed with the parent."""
        self.forget()

    def forget(self) -> None:
        """Drop the references to the cache, so that the next user begins with an empty one."""
        self._lock = Lock()
        self._shared: Callable[[], KVCache | None] = lambda: None  # a weak reference
        self._idle_pool: KVPool | None = None  # kept for a path while it has no user

    def get(self) -> KVCache:
        """Return the cache, a new one if there is none."""
        with self._lock:
            cache = self._shared()
            if cache is None:
                cache = KVCache(self._new_pool, self._idle_pool or self._new_pool(0))
                self._shared = ref(cache)
            return cache

    @property
    def num_bytes(self) -> int:
        """Bytes of the storage, in use or kept."""
        storage = self._shared() or self._idle_pool
        return 0 if storage is None else storage.num_bytes

    def _new_pool(self, num_slots: int) -> KVPool:
        self._idle_pool = None  # replaced by the new pool, and freed with its graphs
        num_padding_slots = max(path.num_padding_slots for path in self._paths)
        return KVPool(self._layout, num_slots, num_padding_slots if num_slots else 0)

    def keep_if_used(self, cache: KVCache) -> None:
        """Keep the pool of a cache that may become idle, if it is small and a path uses it.

        A pool that no path uses is freed at once, as others may refer to the cache for long."""
        max_bytes = max(path.max_idle_bytes(cache.pool) for path in self._paths)
        if not max_bytes:
            cache.trim()
        self._idle_pool = cache.pool if cache.num_bytes <= max_bytes else None
        holders_of_idle_memory.add(self)

    def free_idle_memory(self) -> None:
        """Free the pool that was kept, unless it is in use."""
        self._idle_pool = None
