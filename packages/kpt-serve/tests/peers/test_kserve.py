"""KServe's server with the same program: what it answers, we answer."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import HIDDEN, NAME, Server, request

KSERVE = """
import sys
folder, port = sys.argv[1:]
sys.argv[1:] = ["--http_port", port]  # its servers read the program's arguments
import torch
from kserve import InferOutput, InferResponse, Model, ModelServer
from kpt_serve.package import Manifest
from kpt_serve.package.golden import load_model
manifest = Manifest.read(folder)
class Toy(Model):
    def __init__(self):
        super().__init__(manifest.name)
        self.run, self.ready = load_model(folder, manifest, "cpu"), True
    async def predict(self, payload, headers=None, response_headers=None):
        results = self.run({each.name: torch.from_numpy(each.as_numpy().copy()) for each in payload.inputs})
        outputs = []
        for name, tensor in results.items():
            output = InferOutput(name, list(tensor.shape), "FP32")
            output.set_data_from_numpy(tensor.numpy(), binary_data=False)
            outputs.append(output)
        return InferResponse(payload.id, self.name, outputs)
ModelServer(workers=1, enable_grpc=False).start([Toy()])
"""


@pytest.fixture(scope="module")
def kserve(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    log = tmp_path_factory.mktemp("kserve") / "log"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", KSERVE, str(package), str(port)], stdout=file, stderr=file)
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        try:
            if _ask(port, f"/v2/models/{NAME}/ready")[0] == 200:
                break
        except OSError:
            pass
        time.sleep(0.1)
    yield port
    process.kill()
    process.wait()


def _ask(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    data = json.dumps(body).encode() if body is not None else None
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (5, 3), (64, 2), (1, 512)])
def test_the_same_requests_get_the_same_answers(shape: tuple[int, int], kserve: int, server: Server) -> None:
    torch.manual_seed(sum(shape))
    body = {"id": "7", **request(torch.randn(*shape, HIDDEN))}
    theirs, ours = (_ask(port, f"/v2/models/{NAME}/infer", body) for port in (kserve, server.port))
    assert theirs[0] == ours[0] == 200
    numbers = [each[1]["outputs"][0].pop("data") for each in (theirs, ours)]
    torch.testing.assert_close(torch.tensor(numbers[1]), torch.tensor(numbers[0]), atol=1e-5, rtol=0)
    for key in ("id", "model_name"):
        assert theirs[1][key] == ours[1][key]
    for key in ("name", "shape", "datatype"):
        assert theirs[1]["outputs"][0][key] == ours[1]["outputs"][0][key]


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", f"/v2/models/{NAME}/ready"])
def test_health_has_the_same_code(path: str, kserve: int, server: Server) -> None:
    assert _ask(kserve, path)[0] == _ask(server.port, path)[0] == 200


@pytest.mark.parametrize("path", ["/v2/models/other", "/v2/models/other/infer", "/nowhere"])
def test_what_is_not_there_has_the_same_code(path: str, kserve: int, server: Server) -> None:
    body = {"inputs": []} if path.endswith("infer") else None
    assert _ask(kserve, path, body)[0] == _ask(server.port, path, body)[0] == 404


def test_nobody_can_end_our_service(kserve: int, server: Server) -> None:
    """Theirs is asked too, so that the request is one that would end it."""
    path = f"/v2/repository/models/{NAME}/unload"
    assert [_ask(port, path, {})[0] for port in (kserve, server.port)] == [200, 404]
    infer = f"/v2/models/{NAME}/infer"
    body = request(torch.ones(1, 1, HIDDEN))
    assert [_ask(port, infer, body)[0] for port in (kserve, server.port)] == [404, 200]
