"""One thread that runs a model, and the queue before it, in which requests of one shape join."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .requests import RequestError, Status

Results = dict[str, Tensor]
Run = Callable[[Mapping[str, Tensor]], Results]
_LOG = logging.getLogger("kpt_serve")


@dataclass(eq=False)
class _Job:
    inputs: Mapping[str, Tensor]
    key: tuple[Any, ...]
    rows: int
    answer: "asyncio.Future[Results]"
    since: float = field(default_factory=time.monotonic)
    cancelled: bool = False


class Batcher:
    """Run a model in a thread of its own, requests that came together in one call.

    A request waits for others only while fewer are there than in the call before, and at most for `delay`: a single
    client never waits. What fails together is run again one by one, so that nobody pays for a neighbour.

    Args:
        run: The model; it gets inputs on the CPU and gives results on the CPU.
        rows: Most rows of a call; 1 if the rows of this model depend on each other.
        delay: Seconds.
        queue: Most requests that wait; further ones are refused.
        on_batch: Called with the number of requests of each call.
        on_failure: Called in the thread after a call that failed for no fault of the request's.
    """

    def __init__(
        self,
        run: Run,
        *,
        rows: int,
        delay: float,
        queue: int,
        on_batch: Callable[[int], None] = lambda requests: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._run, self._rows, self._delay, self._limit = run, rows, delay, queue
        self._on_batch, self._on_failure = on_batch, on_failure
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._before = 1  #: requests of the last call
        self._thread = threading.Thread(target=self._work, name="kpt-model", daemon=True)
        self._thread.start()

    def waiting(self) -> int:
        """Return how many requests wait."""
        return len(self._jobs)

    async def submit(self, inputs: Mapping[str, Tensor]) -> Results:
        """Return the results of a request; if the caller is cancelled, it leaves the queue.

        Raises:
            RequestError: The queue is full, or the model failed.
        """
        loop = asyncio.get_running_loop()
        first = next(iter(inputs.values()), None)
        batched = self._rows > 1 and first is not None
        rows = first.shape[0] if batched and first is not None else 1
        key = tuple(tensor.shape[1:] for tensor in inputs.values()) if batched else ()
        job = _Job(inputs, key, rows, loop.create_future())
        with self._changed:
            if self._closed:
                raise RequestError(Status.UNAVAILABLE, "the server stops; ask another one")
            if len(self._jobs) >= self._limit:
                raise RequestError(
                    Status.BUSY, f"{self._limit} requests wait already; try again in a second, or start more servers"
                )
            self._jobs.append(job)
            self._changed.notify()
        try:
            return await job.answer
        except asyncio.CancelledError:
            job.cancelled = True
            with self._changed:
                if job in self._jobs:
                    self._jobs.remove(job)
            raise

    def close(self) -> None:
        """Answer what waits, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._take():
            self._answer(batch)

    def _take(self) -> list[_Job]:
        """Wait for requests and return some that can run in one call; none when closed."""
        batch: list[_Job] = []
        with self._changed:
            while not batch:
                while not self._jobs:
                    if self._closed:
                        return []
                    self._changed.wait()
                until = self._jobs[0].since + self._delay
                while self._jobs:  # all may leave meanwhile
                    batch = self._joined()
                    left = until - time.monotonic()
                    # Nobody waits for others where what comes next is of another shape, or the server stops.
                    full = sum(job.rows for job in batch) >= self._rows or len(batch) < len(self._jobs)
                    if full or len(batch) >= self._before or left <= 0 or self._closed:
                        break
                    batch = []
                    self._changed.wait(left)
            for job in batch:
                self._jobs.remove(job)
        return batch

    def _joined(self) -> list[_Job]:
        """Return the oldest request and those of its shape that fit beside it."""
        batch: list[_Job] = []
        rows = 0
        for job in self._jobs:
            if not batch or (self._rows > 1 and job.key == batch[0].key and rows + job.rows <= self._rows):
                batch.append(job)
                rows += job.rows
        return batch

    def _answer(self, batch: list[_Job]) -> None:
        self._before = len(batch)
        try:
            found: Sequence[Results | RequestError] = self._results(batch)
        except Exception as error:
            if len(batch) > 1:
                for job in batch:
                    if not job.cancelled:
                        self._answer([job])
                self._before = len(batch)
                return
            found = [self._told(error)]
        self._on_batch(len(batch))
        batch[0].answer.get_loop().call_soon_threadsafe(_deliver, batch, found)

    def _results(self, batch: list[_Job]) -> list[Results]:
        if len(batch) == 1:
            return [self._run(batch[0].inputs)]
        together = {name: torch.cat([job.inputs[name] for job in batch]) for name in batch[0].inputs}
        results = self._run(together)
        sizes = [job.rows for job in batch]
        parts = {name: tensor.split(sizes) for name, tensor in results.items()}
        return [{name: part[place] for name, part in parts.items()} for place in range(len(batch))]

    def _told(self, error: Exception) -> RequestError:
        """Return what a client is told of an error of the model."""
        cause = error.__cause__ or error
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(cause, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(cause):
            _LOG.error("out of memory: %s", line)
            return RequestError(Status.BUSY, "the device has no memory for this request now; try again, or send less")
        if isinstance(cause, IndexError) or (isinstance(cause, AssertionError) and "Guard failed" in str(cause)):
            return RequestError(Status.INVALID, line)
        _LOG.error("a request failed: %s", line, exc_info=error)
        self._on_failure()
        return RequestError(Status.FAILED, f"the model failed: {line}")


def _deliver(batch: list[_Job], found: Sequence[Results | RequestError]) -> None:
    for job, result in zip(batch, found, strict=True):
        if job.answer.done():  # cancelled
            continue
        if isinstance(result, RequestError):
            job.answer.set_exception(result)
        else:
            job.answer.set_result(result)
