"""A package and a server of it in a process of its own, as users start one, and a client of the standard library."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

NAME = "toy"
HIDDEN, RESULTS = 64, 16
START = """
import logging, sys
from pathlib import PosixPath
from kpt_serve.errors import PackageError, ServeError
from kpt_serve.oip.server import Options, serve
logging.basicConfig(level="INFO", stream=sys.stderr)
{before}
try:
    sys.exit(serve(sys.argv[1], Options(port=0, grpc_port=0, **eval(sys.argv[2]))))
except (PackageError, ServeError) as error:
    print("error:", error, file=sys.stderr)
    sys.exit(2)
"""


def export(folder: Path) -> Path:
    """Write a package of a small MoE model."""
    from kpt_moe.layers import MoEConfig, MoELayer
    from kpt_serve.package.writing import write_program

    torch.manual_seed(0)
    model = nn.Sequential(MoELayer(MoEConfig(hidden_size=HIDDEN, num_experts=8)), nn.Linear(HIDDEN, RESULTS))
    dynamic: Any = {"input": {0: (1, 64), 1: (1, 512)}}
    write_program(folder, model, torch.randn(2, 8, HIDDEN), name=NAME, dynamic=dynamic)
    return folder


class Server:
    """A process that serves a package; `before` is Python that runs in it first."""

    def __init__(self, folder: Path, before: str = "", **options: Any) -> None:
        options = {"unsigned": True, **options}
        # Errors go to a file: a pipe that nobody reads would stop the server.
        self._log = folder.parent / f"{time.monotonic_ns()}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", START.format(before=before), str(folder), repr(options)],
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.port = self.grpc_port = 0
        self.scheme = "https" if options.get("certificate") else "http"

    def __enter__(self) -> "Server":
        self.wait_for(r"ready\n")
        found = re.search(r"toy: \w+://127.0.0.1:(\d+), gRPC on (\d+)", self.log)
        assert found, self.log
        self.port, self.grpc_port = int(found[1]), int(found[2])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, pattern: str, seconds: float = 60) -> None:
        """Wait until the log says something."""
        until = time.monotonic() + seconds
        while not re.search(pattern, self.log):
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.log}"
            assert time.monotonic() < until, self.log
            time.sleep(0.02)

    def stop(self) -> int:
        """Ask the server to stop, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def ask(
        self, path: str, body: bytes | object = None, headers: Mapping[str, str] | None = None, **options: Any
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Return the code, the JSON or text, and the headers of an answer."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        url = f"{self.scheme}://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data=data, headers=dict(headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=30, **options) as answer:
                code, content, found = answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            code, content, found = error.code, error.read(), error.headers
        try:
            return code, json.loads(content), found
        except ValueError:
            return code, content, found

    def infer(self, x: Tensor, **more: Any) -> tuple[int, Any]:
        """Return the code, and the numbers or the error, of a request in JSON."""
        code, answer, _ = self.ask(f"/v2/models/{NAME}/infer", request(x), **more)
        if code != 200:
            return code, answer["error"]
        output = answer["outputs"][0]
        return code, torch.tensor(output["data"]).reshape(output["shape"])


def request(x: Tensor) -> dict[str, Any]:
    """Return a request in JSON."""
    one = {"name": "input", "datatype": "FP32", "shape": list(x.shape), "data": x.flatten().tolist()}
    return {"inputs": [one]}
