"""The client that asks again, before a server of the standard library that fails as it is told."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from kpt_serve import client
from kpt_serve.client import Client, InferenceError

_LENGTH = "Inference-Header-Content-Length"


class Server(ThreadingHTTPServer):
    """Answer each request with its inputs; before, act what `plan` holds: a code, with headers, or a word."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        self.times: list[float] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Speak as much of the protocol as the tests need."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        length = int(self.headers[_LENGTH])
        document = json.loads(body[:length])
        self.server.times.append(time.monotonic())
        self.server.asked.append(
            {"client": self.client_address, "path": self.path, "headers": self.headers, "document": document}
        )
        act = self.server.plan.pop(0) if self.server.plan else 200
        if act == "close":
            self.close_connection = True
            return
        if act == "sleep":
            time.sleep(2)
            self.close_connection = True
            return
        if act == "cut":
            self.answer(200, b"{", {"Content-Length": "100"})
            self.close_connection = True
            return
        code, headers = act if isinstance(act, tuple) else (act, {})
        if code != 200:
            self.answer(code, b'{"error": "planned"}', headers)
            return
        outputs = [
            {key: value for key, value in each.items() if key != "name"} | {"name": f"{each['name']}_again"}
            for each in document["inputs"]
        ]
        header = json.dumps({"outputs": outputs}).encode()
        self.answer(200, header + body[length:], {_LENGTH: str(len(header))})

    def answer(self, code: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(content)), "Content-Type": "text/plain"} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def connect() -> Iterator[Any]:
    """Return a maker of clients that are closed when the test ends."""
    with ExitStack() as stack:
        yield lambda *urls, **options: stack.enter_context(closing(Client(*urls, **options)))


X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i4", "i8", "f2", "f4", "f8", ">f4"])
def test_arrays_come_back_bit_for_bit(server, connect, dtype):
    found = connect(server.url).infer("toy", {"x": X.astype(dtype), "y": X[:, ::2]})
    assert found["x_again"].dtype == np.dtype(dtype).newbyteorder("<")
    np.testing.assert_array_equal(found["x_again"], X.astype(dtype))
    np.testing.assert_array_equal(found["y_again"], X[:, ::2])
    assert server.asked[0]["path"] == "/v2/models/toy/infer"
    assert server.asked[0]["document"]["parameters"] == {"binary_data_output": True}


def test_token_and_outputs_are_sent(server, connect):
    connect(server.url + "/behind/", token="secret").infer("toy", {"x": X}, ["one"])
    asked = server.asked[0]
    assert asked["path"] == "/behind/v2/models/toy/infer"
    assert asked["headers"]["Authorization"] == "Bearer secret"
    assert [each["name"] for each in asked["document"]["outputs"]] == ["one"]


PROXY = (500, {"Content-Type": "text/plain"})


@pytest.mark.parametrize("act", [502, 503, 504, PROXY, "close", "cut", "sleep"])
def test_what_another_try_may_mend_is_asked_again(server, connect, act):
    server.plan = [act, act]
    asking = connect(server.url, timeout=0.3)
    np.testing.assert_array_equal(asking.infer("toy", {"x": X})["x_again"], X)
    assert len(server.asked) == 3
    assert asking.retries == 2


@pytest.mark.parametrize("code", [400, 401, 404, 408, 413, 429, (500, {"Content-Type": "application/json"})])
def test_what_is_wrong_in_itself_is_asked_once(server, connect, code):
    server.plan = [code]
    with pytest.raises(InferenceError, match="planned") as caught:
        connect(server.url).infer("toy", {"x": X})
    assert caught.value.status == (code if isinstance(code, int) else 500)
    assert len(server.asked) == 1


def test_a_server_says_how_long_to_wait(server, connect):
    server.plan = [(503, {"Retry-After": "1"})]
    connect(server.url).infer("toy", {"x": X})
    assert 1 <= server.times[1] - server.times[0] < 2


def test_waits_double_and_differ(server, connect):
    server.plan = [503] * 5
    connect(server.url).infer("toy", {"x": X})
    waits = np.diff(server.times)
    for place, wait in enumerate(waits):
        longest = client._FIRST * 2**place
        assert longest / 2 <= wait < longest + 0.2, waits
    assert len({round(wait / 2**place, 4) for place, wait in enumerate(waits)}) > 1


def test_the_deadline_ends_tries(server, connect):
    server.plan = [503] * 100
    start = time.monotonic()
    with pytest.raises(InferenceError, match=r"no result within 0\.5 seconds.*503") as caught:
        connect(server.url, deadline=0.5).infer("toy", {"x": X})
    assert time.monotonic() - start < 0.6
    assert caught.value.status == 503


def test_the_deadline_ends_a_silent_try(server, connect):
    server.plan = ["sleep"] * 9
    start = time.monotonic()
    with pytest.raises(InferenceError, match="TimeoutError"):
        connect(server.url, timeout=9, deadline=0.5).infer("toy", {"x": X})
    assert time.monotonic() - start < 0.7


def test_another_server_takes_over(server, connect):
    with Server() as gone:
        closed = gone.url
    for _ in range(4):  # whichever is asked first
        np.testing.assert_array_equal(connect(closed, server.url).infer("toy", {"x": X})["x_again"], X)


def test_a_connection_serves_many_requests(server, connect):
    asking = connect(server.url)
    for _ in range(5):
        asking.infer("toy", {"x": X})
    assert len({each["client"] for each in server.asked}) == 1


@pytest.mark.parametrize("urls", [(), ("localhost:8000",), ("ftp://host",)])
def test_an_address_that_is_none(urls):
    with pytest.raises(ValueError, match="expected some as"):
        Client(*urls)


def test_an_array_that_the_protocol_has_not(server, connect):
    with pytest.raises(ValueError, match="complex64; expected one of"):
        connect(server.url).infer("toy", {"x": X.astype(np.complex64)})
    assert server.asked == []


def test_any_name_is_one_part_of_the_path(server, connect):
    connect(server.url).infer("my m\u00f6del/1", {"x": X})
    assert server.asked[0]["path"] == "/v2/models/my%20m%C3%B6del%2F1/infer"
