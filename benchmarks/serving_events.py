"""What each event costs clients of `kpt serve`: answers lost, wrong ones, seconds; prints a table.

    python benchmarks/serving_events.py [--requests 20000]

Answers are lost if a request was accepted and got none; a refusal (503, 408, 413) is an answer.
"""

import argparse
import http.client
import json
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "packages/kpt-serve/tests/oip"))
from serving import HIDDEN, NAME, Server, export, request

SLOW = """
import time
from kpt_serve.oip.model import Model
run = Model.__call__
def slow(self, inputs):
    time.sleep(0.02)
    return run(self, inputs)
Model.__call__ = slow
"""
FAILING = """
import kpt_backend_cpu.moe.decode
def fail(*args, **kwargs):
    raise RuntimeError("planted")
kpt_backend_cpu.moe.decode.forward = fail
"""
X = torch.linspace(-1, 1, 3 * HIDDEN).reshape(1, 3, HIDDEN)
BODY = json.dumps(request(X)).encode()
ROWS: list[tuple[str, str, float]] = []


def answers(server: Server, right: torch.Tensor, count: int, pool: ThreadPoolExecutor) -> Counter[str]:
    """Return how many requests at once were answered right, wrong, refused or lost."""

    def one(_: int) -> str:
        try:
            code, found = server.infer(X)
        except (OSError, http.client.HTTPException):
            return "lost"
        if code != 200:
            return f"refused with {code}"
        return "right" if torch.allclose(found, right, atol=1e-5) else "wrong"

    return Counter(pool.map(one, range(count)))


def note(event: str, found: Counter[str] | str, begin: float) -> None:
    """Add a row."""
    text = found if isinstance(found, str) else ", ".join(f"{count} {word}" for word, count in sorted(found.items()))
    ROWS.append((event, text, time.monotonic() - begin))
    print(f"{event:52} {text:48} {ROWS[-1][2]:7.2f} s", flush=True)


def main() -> None:
    """Cause each event."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(128) as pool:
        package = export(Path(made) / "toy")
        begin = time.monotonic()
        with Server(package) as server:
            note("start, until ready", "-", begin)
            right = server.infer(X)[1]
            begin = time.monotonic()
            server.process.kill()
            server.process.wait()
        with Server(package) as server:
            same = server.infer(X)[1].equal(right)
            note("kill -9 and a new start", "the same bits" if same else "OTHER BITS", begin)
            steady(server, right, asked.requests)
            large(server)
            begin = time.monotonic()
            note("... after which", answers(server, right, 32, pool), begin)
        with Server(package, before=SLOW) as server:
            begin = time.monotonic()
            waiting = [pool.submit(server.infer, X) for _ in range(32)]
            time.sleep(0.1)
            code = server.stop()
            done = Counter("right" if each.result()[0] == 200 else "refused" for each in waiting)
            note(f"SIGTERM with 32 in flight; exit code {code}", done, begin)
        with Server(package, before=SLOW, queue=8, batch=1) as server:
            begin = time.monotonic()
            note("120 at once, a queue of 8", answers(server, right, 120, pool), begin)
        with Server(package, body_seconds=1.0) as server:
            begin = time.monotonic()
            slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(32)]
            for each in slow:
                each.sendall(f"POST /v2/models/{NAME}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".encode())
            note("32 clients that send nothing, and 32 others", answers(server, right, 32, pool), begin)
            codes = Counter(f"refused with {each.recv(4096).split()[1].decode()}" for each in slow)
            note("... the slow ones, after a limit of 1 s", codes, begin)
            for each in slow:
                each.close()
            begin = time.monotonic()
            gone = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(32)]
            head = f"POST /v2/models/{NAME}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n"
            for each in gone:
                each.sendall(head.encode() + BODY)
                each.close()
            note("32 clients that vanish, and 32 others", answers(server, right, 32, pool), begin)
        with Server(package, before=FAILING) as server:
            begin = time.monotonic()
            note("a kernel that raises", answers(server, right, 32, pool), begin)


def steady(server: Server, right: torch.Tensor, count: int) -> None:
    """Send many requests from 8 clients, and note what memory grew after the first tenth."""
    process = psutil.Process(server.process.pid)
    sizes: list[float] = []

    def client(number: int) -> Counter[str]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        found: Counter[str] = Counter()
        for place in range(count // 8):
            connection.request("POST", f"/v2/models/{NAME}/infer", BODY)
            answer = connection.getresponse()
            output = json.loads(answer.read())["outputs"][0]
            close = torch.allclose(torch.tensor(output["data"]).reshape(right.shape), right, atol=1e-5)
            found["right" if answer.status == 200 and close else "wrong"] += 1
            if number == 0 and place % 50 == 0:
                sizes.append(process.memory_info().rss / 2**20)
        connection.close()
        return found

    begin = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        total = sum(pool.map(client, range(8)), Counter())
    tenth = max(1, len(sizes) // 10)
    first, last = statistics.median(sizes[tenth : 2 * tenth]), statistics.median(sizes[-tenth:])
    note(f"{count:,} requests; memory {first:.0f} MB, then {last:.0f} MB", total, begin)


def large(server: Server) -> None:
    """Send 200 MB from each of 4 clients, and note the largest memory meanwhile."""
    process = psutil.Process(server.process.pid)
    before, most = process.memory_info().rss, [0]
    begin = time.monotonic()

    def one(_: int) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            connection.request("POST", f"/v2/models/{NAME}/infer", bytes(200 << 20))
            return f"refused with {connection.getresponse().status}"
        except OSError as error:
            return f"closed ({type(error).__name__})"

    watch: Callable[[], Any] = lambda: most.append(process.memory_info().rss - before)  # noqa: E731
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(one, number) for number in range(4)]
        while not all(each.done() for each in waiting):
            watch()
            time.sleep(0.01)
        found = Counter(each.result() for each in waiting)
    note(f"4 bodies of 200 MB; memory grew by {max(most) / 2**20:.0f} MB at most", found, begin)


if __name__ == "__main__":
    main()
