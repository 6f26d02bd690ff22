"""What stands in for CUDA graphs in the tests: traces that freeze, as a graph does, all that is read on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hf_slospec.models.attention.packing import Entries
from tests.flash_stand_in import StandIn


class Traces:
    """Calls operators on the very tensors they were traced with: weights, K/V and inputs are constants, by address."""

    max_bytes = 2**40

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def capture(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        trace: Any = make_fx(run, tracing_mode="real")()
        self.num_captured += 1

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            out: torch.Tensor = trace()
            return out

        return replay

    def num_bytes(self) -> int:
        return 0

    def is_usable(self) -> bool:
        return True


class OpaqueStandIn(StandIn):
    """One operator to whoever traces it, as a flash-attention kernel is."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        entries: Entries,
        scaling: float,
        is_causal: bool,
        window: int | None,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append((is_causal, entries.max_queries, query.shape[1] // key.shape[1]))
        cumulative = entries.cu_queries, entries.cu_keys
        most = entries.max_queries, entries.max_keys
        out: tuple[torch.Tensor, torch.Tensor] = _kernel(
            query, key, value, entries.rows, *cumulative, *most, scaling, is_causal, window, softcap
        )
        return out


@torch.library.custom_op("hf_slospec_tests::flash_stand_in", mutates_args=())
def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    max_queries: int,
    max_keys: int,
    scaling: float,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    entries = Entries(rows, cu_queries, cu_keys, max_queries, max_keys)
    kernel = StandIn(query.device)
    return kernel(query, key, value, entries, scaling, is_causal, window, softcap)
