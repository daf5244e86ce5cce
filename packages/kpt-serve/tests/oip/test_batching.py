"""The queue before a model: which requests join, what a failure costs the others, who leaves, when it is full."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kpt_serve.oip.batching import Batcher
from kpt_serve.oip.requests import RequestError, Status


class Doubling:
    """A model that doubles, notes the rows of each call, and waits for leave."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.leave = threading.Event()
        self.leave.set()
        self.entered = threading.Event()

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.entered.set()
        self.leave.wait(10)
        x = inputs["x"]
        self.calls.append(len(x))
        if bool(x.isnan().any()):
            raise ValueError("NaN is planted")
        return {"y": x * 2}


def run(work: Callable[[Batcher, Doubling], Awaitable[Any]], **options: Any) -> tuple[Any, Doubling]:
    model = Doubling()
    batcher = Batcher(model, **{"rows": 8, "delay": 0.2, "queue": 100, **options})
    try:
        return asyncio.run(asyncio.wait_for(work(batcher, model), 20)), model
    finally:
        model.leave.set()
        batcher.close()


async def held(
    batcher: Batcher, model: Doubling, sizes: list[tuple[int, ...]]
) -> "list[asyncio.Task[dict[str, Tensor]]]":
    """Return requests, all but the first of which wait since the model is busy with that."""
    model.leave.clear()
    tasks = []
    for place, size in enumerate(sizes):
        tasks.append(asyncio.create_task(batcher.submit({"x": torch.full(size, float(place))})))
        if place == 0:
            await asyncio.to_thread(model.entered.wait, 10)
    await settled(batcher, len(sizes) - 1)
    return tasks


async def settled(batcher: Batcher, waiting: int) -> None:
    while batcher.waiting() != waiting:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("rows", "sizes", "calls"),
    [
        (8, [(1, 3)] * 5, [1, 4]),  # what waits while the model is busy is one call
        (8, [(1, 3), (3, 3), (3, 3), (3, 3)], [1, 6, 3]),  # no more rows than allowed
        (8, [(1, 3), (1, 3), (1, 4), (1, 3)], [1, 2, 1]),  # other shapes wait for their turn
        (8, [(1, 3), (9, 3)], [1, 9]),  # a request is never cut
        (1, [(1, 3)] * 3, [1, 1, 1]),
    ],
)
def test_requests_of_one_shape_join(rows: int, sizes: list[tuple[int, ...]], calls: list[int]) -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        tasks = await held(batcher, model, sizes)
        model.leave.set()
        for place, result in enumerate(await asyncio.gather(*tasks)):
            assert result["y"].equal(torch.full(sizes[place], 2.0 * place))

    _, model = run(work, rows=rows)
    assert model.calls == calls


def test_a_single_client_never_waits_for_others() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        async with asyncio.timeout(5):
            for _ in range(3):
                await batcher.submit({"x": torch.ones(1, 2)})

    run(work, delay=60.0)


def test_after_a_batch_a_request_waits_for_others_no_longer_than_the_delay() -> None:
    async def work(batcher: Batcher, model: Doubling) -> float:
        tasks = await held(batcher, model, [(1, 2)] * 3)
        model.leave.set()
        await asyncio.gather(*tasks)
        start = asyncio.get_running_loop().time()
        await batcher.submit({"x": torch.ones(1, 2)})
        alone = asyncio.get_running_loop().time() - start
        await asyncio.gather(*(batcher.submit({"x": torch.ones(1, 2)}) for _ in range(2)))
        return alone

    alone, model = run(work, delay=0.2)
    assert 0.15 < alone < 5
    assert model.calls[:3] == [1, 2, 1]


def test_a_bad_neighbour_costs_nobody_an_answer() -> None:
    async def work(batcher: Batcher, model: Doubling) -> list[Any]:
        tasks = await held(batcher, model, [(1, 2)] * 3)
        bad = asyncio.create_task(batcher.submit({"x": torch.full((1, 2), torch.nan)}))
        await settled(batcher, 3)
        model.leave.set()
        return await asyncio.gather(*tasks, bad, return_exceptions=True)

    failures: list[int] = []
    results, model = run(work, on_failure=lambda: failures.append(1))
    assert [float(each["y"][0, 0]) for each in results[:3]] == [0, 2, 4]
    assert isinstance(results[3], RequestError)
    assert (results[3].status, str(results[3])) == (Status.FAILED, "the model failed: NaN is planted")
    assert model.calls == [1, 3, 1, 1, 1]
    assert failures == [1]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), Status.BUSY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), Status.BUSY),
        (IndexError("index out of range in self"), Status.INVALID),
        (AssertionError("Guard failed: x.size()[0] == y.size()[0]"), Status.INVALID),
        (AssertionError("something else"), Status.FAILED),
    ],
)
def test_errors_of_a_model_have_a_status(error: Exception, status: Status) -> None:
    def fail(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        try:
            raise error
        except Exception as cause:
            raise ValueError("the program fails") from cause

    async def work() -> None:
        with pytest.raises(RequestError) as caught:
            await batcher.submit({"x": torch.ones(1)})
        assert caught.value.status is status

    batcher = Batcher(fail, rows=1, delay=0, queue=1)
    asyncio.run(work())
    batcher.close()


def test_a_client_that_leaves_takes_its_request_with_it_and_a_full_queue_refuses() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        tasks = await held(batcher, model, [(1, 2)] * 4)
        with pytest.raises(RequestError, match="3 requests wait already; try again") as caught:
            await batcher.submit({"x": torch.ones(1, 2)})
        assert caught.value.status is Status.BUSY
        tasks[2].cancel()
        await settled(batcher, 2)
        model.leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert tasks[2].cancelled()

    _, model = run(work, queue=3)
    assert model.calls == [1, 2]


def test_closing_answers_what_waits_and_takes_no_more() -> None:
    async def work(batcher: Batcher, model: Doubling) -> None:
        tasks = await held(batcher, model, [(1, 2)] * 3)
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="the server stops"):
            await batcher.submit({"x": torch.ones(1, 2)})
        model.leave.set()
        assert len(await asyncio.gather(*tasks)) == 3
        await closing

    run(work)
