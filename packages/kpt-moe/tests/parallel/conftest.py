"""Running a function on several ranks."""

import multiprocessing
import pickle
import time
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from ranks import run_rank

# The server imports these once, so that a rank costs a fork.
_PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "kpt_moe", "kpt_moe.parallel"]


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., list[Any]]:
    """`launch(ranks, function, *arguments)` gives what `function(rank, *arguments)` returned on each rank.

    A rank that ends without a result gives its exit code, if `may_die`. The first rank to fail ends the test with its
    traceback, and nothing outlives `limit` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)

    def run(
        ranks: int,
        function: Callable[..., Any],
        *arguments: Any,
        limit: float = 180,
        collective_timeout: float = 60,
        may_die: bool = False,
    ) -> list[Any]:
        store = str(tmp_path / uuid.uuid4().hex)
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        workers = [
            context.Process(target=run_rank, args=(function, rank, ranks, store, collective_timeout, arguments, end))
            for rank, (_, end) in enumerate(pipes)
        ]
        for worker in workers:
            worker.start()
        for _, end in pipes:
            end.close()
        results: list[Any] = [None] * ranks
        pending: dict[Any, int] = {reader: rank for rank, (reader, _) in enumerate(pipes)}
        deadline = time.monotonic() + limit
        try:
            while pending:
                ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    pytest.fail(f"ranks {sorted(pending.values())} of {ranks} did not end within {limit} s")
                for reader in ready:
                    assert isinstance(reader, Connection)
                    rank = pending.pop(reader)
                    try:
                        well, results[rank] = pickle.loads(reader.recv_bytes())
                    except EOFError:
                        workers[rank].join(5)
                        results[rank] = workers[rank].exitcode
                        well = may_die
                    if not well:
                        pytest.fail(f"rank {rank} of {ranks}:\n{results[rank]}", pytrace=False)
        finally:
            for worker, (reader, _) in zip(workers, pipes, strict=True):
                worker.join(max(0.0, min(5.0, deadline - time.monotonic())) if not pending else 0)
                if worker.is_alive():
                    worker.kill()
                worker.join()
                worker.close()
                reader.close()
        return results

    return run
