"""Clients that ask without a pause, and what they got."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
from safetensors.numpy import load_file

from kpt_serve.client import Client, InferenceError

CLIENTS = 16
ROWS: list[str] = []  #: of the table


class Golden:
    """The golden inputs of the toy package, and whether an answer to one is right."""

    def __init__(self, package: Path) -> None:
        tensors = load_file(package / "golden.safetensors")
        places = sorted({name.partition("/")[0] for name in tensors})
        self.inputs = [tensors[f"{place}/input/input"] for place in places]
        self._outputs = [tensors[f"{place}/output/output"] for place in places]

    def ask(self, client: Client, place: int) -> bool:
        place %= len(self.inputs)
        found = client.infer("toy", {"input": self.inputs[place]})["output"]
        return found.shape == self._outputs[place].shape and np.allclose(found, self._outputs[place], 1e-4, 1e-5)


class Load:
    """Ask by 16 clients until the end of a `with` statement; then add a row to the table."""

    def __init__(self, url: str, golden: Golden, event: str) -> None:
        self._url, self._golden, self._event = url, golden, event
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, args=(place,)) for place in range(CLIENTS)]
        self.answers: list[float] = []  #: when each came
        self.lost: list[str] = []
        self.wrong = self.retries = 0
        self.longest = 0.0
        self.mended = 0.0
        self._left = CLIENTS

    def __enter__(self) -> "Load":
        self._start = time.monotonic()
        for thread in self._threads:
            thread.start()
        self.wait_for(lambda: len(self.answers) > 8 * CLIENTS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seen = len(self.answers)
        if error is None:  # what comes after the event is asked too
            self.wait_for(lambda: len(self.answers) > seen + 8 * CLIENTS)
        self._stop.set()
        for thread in self._threads:
            thread.join()
        times = sorted(self.answers)
        self.silence = float(np.diff(times).max())
        self.rate = len(times) / (times[-1] - times[0])
        if not ROWS or not ROWS[-1].endswith("|"):
            ROWS.append("| event | answers | answers/s | lost | wrong | tried again | silence | longest | took |")
        ROWS.append(
            f"| {self._event} | {len(times)} | {self.rate:.0f} | {len(self.lost)} | {self.wrong} | {self.retries} | "
            f"{self.silence:.2f} s | {self.longest:.1f} s | {self.mended:.1f} s |"
        )

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Note how long an event takes until it has its full effect."""
        start = time.monotonic()
        yield
        self.mended = time.monotonic() - start

    def keep(self, clients: int) -> None:
        """Let all clients but some end."""
        self._left = clients

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"not within {seconds} seconds; lost: {self.lost[:3]}"
            time.sleep(0.1)

    def _work(self, place: int) -> None:
        number = place
        client = Client(self._url, timeout=10, deadline=60)
        while number < self._left and not self._stop.is_set():
            place += 1
            start = time.monotonic()
            try:
                right = self._golden.ask(client, place)
            except InferenceError as error:
                self.lost.append(str(error))
                continue
            now = time.monotonic()
            with self._lock:
                self.answers.append(now)
                self.wrong += not right
                self.longest = max(self.longest, now - start)
        client.close()
        with self._lock:
            self.retries += client.retries
