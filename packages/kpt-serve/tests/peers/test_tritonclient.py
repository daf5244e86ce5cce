"""NVIDIA's client of the protocol, over REST and gRPC."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from safetensors.numpy import load_file
from serving import HIDDEN, NAME, RESULTS, Server
from tritonclient.utils import InferenceServerException

Client = tuple[Any, Any]


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Client]:
    module = getattr(tritonclient, request.param)
    port = server.port if request.param == "http" else server.grpc_port
    made = module.InferenceServerClient(f"127.0.0.1:{port}")
    yield module, made
    made.close()


def infer(client: Client, x: np.ndarray, name: str = NAME, **options: Any) -> Any:
    module, made = client
    given = module.InferInput("input", list(x.shape), "FP32")
    given.set_data_from_numpy(x)
    return made.infer(name, [given], **options)


def test_golden_results(client: Client, package: Path) -> None:
    golden = load_file(package / "golden.safetensors")
    for case in (0, 1):
        x, right = golden[f"{case}/input/input"], golden[f"{case}/output/output"]
        answer = infer(client, x, request_id="7")
        np.testing.assert_allclose(answer.as_numpy("output"), right, atol=1e-5)


def test_outputs_by_name_and_as_numbers(client: Client) -> None:
    module, _ = client
    x = np.ones((1, 2, HIDDEN), np.float32)
    right = infer(client, x).as_numpy("output")
    asked = [module.InferRequestedOutput("output")]
    if module is tritonclient.http:
        asked.append(module.InferRequestedOutput("output", binary_data=False))
    for each in asked:
        assert infer(client, x, outputs=[each]).as_numpy("output").tobytes() == right.tobytes()


def test_health_and_metadata(client: Client) -> None:
    _, made = client
    assert made.is_server_live()
    assert made.is_server_ready()
    assert made.is_model_ready(NAME)
    found = made.get_model_metadata(NAME)
    outputs = (
        found["outputs"]
        if isinstance(found, dict)
        else [{"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in found.outputs]
    )
    assert outputs == [{"name": "output", "datatype": "FP32", "shape": [-1, -1, RESULTS]}]
    about = made.get_server_metadata()
    assert (about["name"] if isinstance(about, dict) else about.name) == "kpt-serve"


@pytest.mark.parametrize(
    ("x", "name", "text"),
    [
        (np.ones((1, 2, 3), np.float32), NAME, r"input 'input' has shape \[1, 2, 3\]; expected \[1..64, 1..512, 64\]"),
        (np.ones((1, 2, HIDDEN), np.float32), "other", "there is no model other"),
    ],
)
def test_errors_are_the_clients_own(client: Client, x: np.ndarray, name: str, text: str) -> None:
    with pytest.raises(InferenceServerException, match=text):
        infer(client, x, name)


def test_many_at_once(client: Client) -> None:
    """Each answer goes to its own request."""
    module, made = client
    if module is tritonclient.http:
        pytest.skip("its parallel calls need gevent's pool, which the single-client test of REST does not")
    from concurrent.futures import Future

    futures: list[tuple[float, Future[Any]]] = []
    for number in range(64):
        x = np.full((1, 1, HIDDEN), number / 64, np.float32)
        given = module.InferInput("input", list(x.shape), "FP32")
        given.set_data_from_numpy(x)
        future: Future[Any] = Future()
        made.async_infer(
            NAME, [given], callback=lambda result, error, future=future: future.set_result((result, error))
        )
        futures.append((number / 64, future))
    for value, future in futures:
        result, error = future.result(30)
        assert error is None
        right = infer(client, np.full((1, 1, HIDDEN), value, np.float32)).as_numpy("output")
        np.testing.assert_allclose(result.as_numpy("output"), right, atol=1e-5)
