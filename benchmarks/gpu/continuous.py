"""Transformers' continuous batching as a method of the speed comparison."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_kernels_available,
)

PAGE = 256  # tokens: transformers' default
LIMIT_S = 40.0  # per call, so that a blocked thread does not block the check


class ContinuousBatching:
    """One persistent manager with its K/V cache and CUDA graphs for all calls at one batch size, as
    in a server.

    It is active only inside of ``running``, because it changes the model's attention and other
    methods use the model."""

    def __init__(self, target: Any, batch: int, prompt_tokens: int, new_tokens: int):
        self.target = target
        self.new_tokens = new_tokens
        # A separate config, because the manager changes it.
        self._generation = GenerationConfig(
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=target.generation_config.pad_token_id,
        )
        # By default its K/V cache takes nine tenths of the free memory, which other methods need.
        # It gets 1.5 times the tokens of these texts, since it starts no prompt while few blocks
        # are free. All prompts fit into one forward.
        pages = -(-(prompt_tokens + new_tokens) // PAGE)
        self._config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=batch * pages * 3 // 2 + 4,
            max_batch_tokens=max(PAGE, batch * prompt_tokens),
            max_requests_per_batch=batch,
            # With the `kernels` package installed, switching would download a kernel.
            auto_switch_to_flash=not is_kernels_available()
            and (is_flash_attn_2_available() or is_flash_attn_3_available()),
        )
        self._manager: Any = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Activate the manager inside of the context."""
        idle = _idle_bytes()
        with self.target.continuous_batching_context_manager(
            generation_config=self._generation,
            continuous_batching_config=self._config,
            persistent_manager=True,
            timeout=LIMIT_S,
        ) as self._manager:
            yield
        # It has returned idle memory to the device; allocate it again outside of the time of the
        # next method.
        if (missing := idle - _idle_bytes()) > 0:
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(missing, dtype=torch.uint8, device=self.target.device)

    @property
    def facts(self) -> dict[str, Any]:
        """Settings that the manager chose."""
        config = self._manager.continuous_batching_config
        return {
            "attention": self._manager.model.config._attn_implementation,
            "cuda_graphs": config.use_cuda_graph,
            "asynchronous": config.use_async_batching,
        }

    def __call__(self, encoded: dict[str, torch.Tensor]) -> torch.Tensor:
        """Decode a batch.  -> [batch, padded_len + new_tokens] int64, padded like the output of
        stock ``generate``
        """
        input_ids = encoded["input_ids"]
        mask = encoded["attention_mask"].bool()
        prompts = [ids[own].tolist() for ids, own in zip(input_ids, mask, strict=True)]
        names = self._manager.add_requests(prompts, max_new_tokens=self.new_tokens)
        done: dict[str, list[int]] = {}
        until_s = time.monotonic() + LIMIT_S
        while len(done) < len(names):
            result = self._manager.get_result(timeout=0.5)
            if result is not None and result.error is not None:
                raise (MemoryError if "out of memory" in result.error else RuntimeError)(
                    result.error
                )
            if result is not None and result.is_finished():
                done[result.request_id] = result.generated_tokens
            elif result is None and not (self._manager.is_running() and time.monotonic() < until_s):
                raise RuntimeError(
                    f"continuous batching returned {len(done)} of {len(names)} results within {LIMIT_S:g} s"
                )
        new = torch.tensor([done[name] for name in names], device=input_ids.device)
        return torch.cat((input_ids, new), dim=1)

    def close(self) -> None:
        """Release its memory."""
        self._manager = None
        self.target.destroy_cached_continuous_batching_manager()


def _idle_bytes() -> int:
    """Return the bytes that torch's allocator holds without use."""
    return (
        torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if torch.cuda.is_initialized()
        else 0
    )
