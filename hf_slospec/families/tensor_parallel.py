"""Batcher of a tensor-parallel model: the first process takes all decisions, and the other
processes repeat the calls of its target.

The first process runs the batcher, with the only queue, clock, policy, drafter and samplers. Its
engine calls the methods of :class:`~hf_slospec.engine.interfaces.Target`; each such call is sent to
the other processes as an order, and their targets carry it out on the same tokens. So all processes
hold K/V of the same requests, each for its part of the heads, and run the same forwards, which are
collective operations."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from hf_slospec.engine.interfaces import Chooser, Chunk
from hf_slospec.engine.step import Engine
from hf_slospec.errors import InvalidInputError, NotRunningError
from hf_slospec.families.ranks import SplitRanks
from hf_slospec.generate.speculator import Speculator
from hf_slospec.model.target import PackedTarget
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.scheduler.continuous import ContinuousScheduler
from hf_slospec.tree.tree import TokenTree

logger = logging.getLogger(__name__)
# Fields of RequestParams that a target reads, besides prompt_reader.
READ = ("prompt", "max_new_tokens", "cache_salt", "num_padding")


@dataclass
class UnreadPrompt:
    """Prompt reader of the other processes, which only counts.

    All processes compute the prompt's logits together, but only the first one reads them.
    """

    num_read: int  # number of prompt tokens whose next-token logits have been computed

    def take(self, logits: Any) -> None:
        """Count the logits of the prompt's next positions."""
        self.num_read += len(logits)


class News(NamedTuple):
    """Changes to a request that the other processes have not received yet."""

    request: int  # index of the request
    tokens: list[int]  # new tokens; for a new request, the tokens after the prompt
    params: dict[str, Any] | None  # RequestParams of a new request that a target reads; else None


class TargetCall(NamedTuple):
    """An order: call the same method as the first process's target, with the same arguments."""

    name: str  # method of the target
    arguments: tuple[Any, ...]  # requests are replaced by their indices
    news: tuple[News, ...]  # to apply before the call
    # The first process's state of the weights. With it, all processes drop the same K/V, cached
    # under other weights.
    weights_state: int


class LeadingTarget(PackedTarget):
    """Target of the first process, which sends its calls to the other processes as orders."""

    def __init__(self, speculator: Speculator, ranks: SplitRanks, *others: Any):
        """Make a target.

        Args:
            speculator: provides the model and the maximum number of nodes.
            ranks: ranks of the model.
            others: further positional arguments of :class:`PackedTarget`.
        """
        packed = speculator.target.packed
        super().__init__(packed, speculator.max_nodes, *others)
        self._speculator = speculator
        self._ranks = ranks
        # Number of each request's tokens that the other processes have received.
        self._num_known = dict[Request, int]()

    def _begin(self) -> None:
        """Take note of changed weights; this state applies in all processes until the next call."""
        version = self.sequences.packed.version
        version.notice(structure=False)
        self.sequences.decided_state = version.weights

    def _send(self, name: str, *arguments: Any, about: Iterable[Request] = ()) -> None:
        news = tuple(self._news(about))
        self._ranks.orders.send(TargetCall(name, arguments, news, self.sequences.weights_state))

    def _news(self, requests: Iterable[Request]) -> Iterable[News]:
        for request in requests:
            num_known = self._num_known.get(request)
            params = None
            if num_known is None:
                num_known, params = (
                    request.prompt_len,
                    {name: getattr(request.params, name) for name in READ},
                )
                if (reader := request.params.prompt_reader) is not None:
                    params["prompt_reader"] = UnreadPrompt(reader.num_read)
            if params is not None or num_known < len(request.tokens):
                yield News(request.index, request.tokens[num_known:], params)
            self._num_known[request] = len(request.tokens)

    def verify(
        self, requests: Sequence[Request], trees: Sequence[TokenTree], chunks: Sequence[Chunk] = ()
    ) -> Sequence[Chooser]:
        about = [*requests, *(chunk.request for chunk in chunks)]
        self._begin()
        self._send("verify", _indices(requests), trees, _counts(chunks), about=about)
        return super().verify(requests, trees, chunks)

    def commit(
        self,
        requests: Sequence[Request],
        accepted: Sequence[Sequence[int]],
        chunks: Sequence[Chunk] = (),
    ) -> None:
        self._send("commit", _indices(requests), accepted, _counts(chunks), about=requests)
        super().commit(requests, accepted, chunks)

    def reuse(self, request: Request) -> int:
        self._begin()
        num_cached = super().reuse(request)
        self._send("reuse", request.index, num_cached, about=[request])
        return num_cached

    def release(self, request: Request) -> None:
        self._begin()
        super().release(request)
        if self._num_known.pop(request, None) is not None:
            self._send("release", request.index, request.error is None)

    def close(self) -> None:
        learned = None
        try:
            super().close()
            learned = self._speculator.learned
        finally:
            self._send("close", learned)


def _indices(requests: Iterable[Request]) -> list[int]:
    return [request.index for request in requests]


def _counts(chunks: Iterable[Chunk]) -> list[tuple[int, int]]:
    return [(chunk.request.index, chunk.num_tokens) for chunk in chunks]


class RepeatingProcess:
    """Batcher's part in a process that is not the first: a thread that carries out the orders of
    the first process until the batcher there is stopped.
    """

    def __init__(
        self,
        ranks: SplitRanks,
        new_engine: Callable[[], Engine[ContinuousScheduler]],
        speculator: Speculator,
        in_thread: Callable[[], AbstractContextManager[Any]],
    ):
        """Create the object without starting its thread.

        Args:
            ranks: ranks of the model.
            new_engine: makes the engine whose target carries out the orders.
            speculator: the speculator of the model in this process.
            in_thread: makes the context in which the thread runs.
        """
        self._new_engine = new_engine
        self._speculator = speculator
        self._in_thread = in_thread
        self._ranks = ranks
        self._lock = speculator.lock
        self._requests: dict[int, Request] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_closed = False  # the last order ("close") was received

    def start(self) -> None:
        """Start the thread that carries out orders, unless it runs.

        The first process must start its batcher, too.
        """
        if self.is_running:
            return
        if self._thread is not None:
            self._thread.join()
        engine = self._new_engine()
        self._error = None
        self._is_closed = False
        # The calling thread, which may have loaded and measured the models, is done computing.
        self._lock.rest()
        thread = threading.Thread(target=self._run, args=(engine,), name="hf_slospec", daemon=True)
        thread.start()
        self._thread = thread

    @property
    def is_running(self) -> bool:
        """Return whether the thread is carrying out orders."""
        return self._thread is not None and self._thread.is_alive() and not self._is_closed

    def refuse(self) -> NoReturn:
        """Raise NotRunningError: only the first process takes requests."""
        raise NotRunningError(
            "the batcher of a tensor-parallel model takes requests in its first process; call it there"
        )

    def stop(self, drain: bool, timeout: float | None) -> None:
        """Wait until the first process stops its batcher; this process cannot stop it.

        If an error ended this process's part, it is raised.

        Args:
            drain: not used, as the first process decides.
            timeout: not used, as the first process decides.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def _run(self, engine: Engine[ContinuousScheduler]) -> None:
        with self._in_thread():
            try:
                while (order := self._ranks.orders.receive()).name != "close":
                    self._carry_out(engine, order)
                self._is_closed = True
                (learned,) = order.arguments
                if learned is not None:
                    self._speculator.take_over(learned)
            except BaseException as error:
                logger.exception(
                    "this process can no longer compute its part of the model; end all of them"
                )
                self._error = error
            finally:
                self._requests.clear()
                with self._lock:
                    engine.close()

    def _carry_out(self, engine: Engine[ContinuousScheduler], order: TargetCall) -> None:
        """Run a call of the first process's target on this process's target.

        A step that does not fit into memory fails in the first process, too, which decides what to
        do next. After any other error, this process no longer holds the same K/V as the first one;
        it then fails the comparison before the next forward, which raises an error in all
        processes."""
        with self._lock:
            if self._error is None:
                try:
                    self._learn(order.news)
                    assert isinstance(engine.target, PackedTarget)
                    engine.target.sequences.decided_state = order.weights_state
                    getattr(self, f"_{order.name}")(engine, *order.arguments)
                except MemoryError as error:
                    logger.info("%s was out of memory: %s", order.name, error)
                except Exception as error:
                    logger.exception(
                        "this process lost what the first one has; its batcher ends with the next step"
                    )
                    self._error = error
            elif order.name == "verify":
                with suppress(InvalidInputError):
                    self._ranks.check_equal([[-1]])

    def _learn(self, news: Iterable[News]) -> None:
        for index, tokens, params in news:
            if params is not None:
                self._requests[index] = Request(index, RequestParams(**params))
            self._requests[index].tokens += tokens

    def _of(self, indices: Iterable[int]) -> list[Request]:
        return [self._requests[index] for index in indices]

    def _chunks(self, counts: Iterable[tuple[int, int]]) -> list[Chunk]:
        return [
            Chunk(self._requests[index], num_tokens, is_last=False) for index, num_tokens in counts
        ]

    def _verify(
        self,
        engine: Engine[Any],
        requests: list[int],
        trees: list[TokenTree],
        chunks: list[tuple[int, int]],
    ) -> None:
        engine.target.verify(self._of(requests), trees, self._chunks(chunks))

    def _commit(
        self,
        engine: Engine[Any],
        requests: list[int],
        accepted: list[Sequence[int]],
        chunks: list[tuple[int, int]],
    ) -> None:
        engine.target.commit(self._of(requests), accepted, self._chunks(chunks))

    def _reuse(self, engine: Engine[Any], index: int, num_cached: int) -> None:
        if (num_here := engine.target.reuse(self._requests[index])) != num_cached:
            raise InvalidInputError(
                f"the first process of a tensor-parallel model has K/V of {num_cached} tokens of a request, and this "
                f"one of {num_here}; change weights in all processes while no request runs, and call weights_changed()"
            )

    def _release(self, engine: Engine[Any], index: int, has_succeeded: bool) -> None:
        request = self._requests.pop(index)
        if not has_succeeded:
            request.end(NotRunningError("the request failed in the first process"))
        engine.forget([request])
