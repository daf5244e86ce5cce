"""What a server answers, by REST with numbers and with bytes and by gRPC, to right and to wrong requests."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file
from serving import HIDDEN, NAME, RESULTS, Server, request

from kpt_serve.oip.grpc import messages

INFER = f"/v2/models/{NAME}/infer"
TYPES = messages()
LENGTH = "Inference-Header-Content-Length"


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield channel


def call(channel: grpc.Channel, method: str, request: Any, **options: Any) -> Any:
    answer = TYPES[type(request).__name__.replace("Request", "Response")]
    run = channel.unary_unary(
        f"/inference.GRPCInferenceService/{method}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=answer.FromString,
    )
    return run(request, timeout=30, **options)


def infer_request(x: torch.Tensor, raw: bool = True, **changes: Any) -> Any:
    made = TYPES["ModelInferRequest"](model_name=NAME, id="7", **changes)
    one = made.inputs.add(name="input", datatype="FP32", shape=x.shape)
    if raw:
        made.raw_input_contents.append(x.numpy().tobytes())
    else:
        one.contents.fp32_contents.extend(x.flatten().tolist())
    return made


def by_numbers(server: Server, channel: grpc.Channel, x: torch.Tensor) -> torch.Tensor:
    return server.infer(x)[1]  # type: ignore[no-any-return]


def by_nested_numbers(server: Server, channel: grpc.Channel, x: torch.Tensor) -> torch.Tensor:
    body = request(x)
    body["inputs"][0]["data"] = x.tolist()
    output = server.ask(INFER, body)[1]["outputs"][0]
    return torch.tensor(output["data"]).reshape(output["shape"])


def by_bytes(server: Server, channel: grpc.Channel, x: torch.Tensor) -> torch.Tensor:
    raw = x.numpy().tobytes()
    one = {"name": "input", "datatype": "FP32", "shape": list(x.shape), "parameters": {"binary_data_size": len(raw)}}
    header = json.dumps({"id": "9", "parameters": {"binary_data_output": True}, "inputs": [one]}).encode()
    code, content, headers = server.ask(INFER, header + raw, {LENGTH: str(len(header))})
    assert code == 200, content
    length = int(headers[LENGTH])
    answer = json.loads(content[:length])
    output = answer["outputs"][0]
    assert answer["id"] == "9"
    assert output["parameters"] == {"binary_data_size": len(content) - length}
    return torch.frombuffer(bytearray(content[length:]), dtype=torch.float32).reshape(output["shape"])


def by_grpc(server: Server, channel: grpc.Channel, x: torch.Tensor, raw: bool = True) -> torch.Tensor:
    answer = call(channel, "ModelInfer", infer_request(x, raw))
    assert (answer.model_name, answer.id, answer.outputs[0].datatype) == (NAME, "7", "FP32")
    content = bytearray(answer.raw_output_contents[0])
    return torch.frombuffer(content, dtype=torch.float32).reshape(tuple(answer.outputs[0].shape))


def by_grpc_numbers(server: Server, channel: grpc.Channel, x: torch.Tensor) -> torch.Tensor:
    return by_grpc(server, channel, x, raw=False)


@pytest.mark.parametrize("way", [by_numbers, by_nested_numbers, by_bytes, by_grpc, by_grpc_numbers])
@pytest.mark.parametrize("case", [0, 1, "large"])
def test_every_way_gives_the_golden_results(
    way: Callable[..., torch.Tensor], case: int | str, server: Server, channel: grpc.Channel, package: Path
) -> None:
    golden = load_file(package / "golden.safetensors")
    if case == "large":  # past what the loop parses by itself
        x = torch.cat([golden["0/input/input"]] * 8)
        right = torch.cat([golden["0/output/output"]] * 8)
    else:
        x, right = golden[f"{case}/input/input"], golden[f"{case}/output/output"]
    found = way(server, channel, x)
    assert found.shape == right.shape
    assert float((found - right).abs().mean() / right.abs().mean()) < 1e-5


def test_metadata_is_the_manifests(server: Server, channel: grpc.Channel) -> None:
    code, about, _ = server.ask(f"/v2/models/{NAME}")
    assert code == 200
    assert about["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, -1, HIDDEN]}]
    assert about["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, -1, RESULTS]}]
    assert server.ask(f"/v2/models/{NAME}/versions/1")[1] == about
    assert server.ask("/v2")[1]["extensions"] == ["binary_tensor_data"]
    same = call(channel, "ModelMetadata", TYPES["ModelMetadataRequest"](name=NAME))
    assert [(each.name, each.datatype, list(each.shape)) for each in same.outputs] == [
        ("output", "FP32", [-1, -1, RESULTS])
    ]
    assert call(channel, "ServerMetadata", TYPES["ServerMetadataRequest"]()).name == "kpt-serve"


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", f"/v2/models/{NAME}/ready"])
def test_health(path: str, server: Server, channel: grpc.Channel) -> None:
    assert server.ask(path)[:2] == (200, {path.rpartition("/")[2]: True})
    assert call(channel, "ServerLive", TYPES["ServerLiveRequest"]()).live
    assert call(channel, "ServerReady", TYPES["ServerReadyRequest"]()).ready
    assert call(channel, "ModelReady", TYPES["ModelReadyRequest"](name=NAME)).ready


GOOD = {"name": "input", "datatype": "FP32", "shape": [1, 1, HIDDEN], "data": [0.5] * HIDDEN}


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (b"{", 400, "the request is no JSON"),
        (b"[" * 100_000, 400, "the request is no JSON"),
        (b"\xff", 400, "the request is no JSON"),
        ([], 400, "the request is a list; expected an object with 'inputs'"),
        ({}, 400, "'inputs' is None; expected a list of objects"),
        ({"inputs": [7]}, 400, "'inputs' is [7]; expected a list of objects"),
        ({"inputs": []}, 400, "input 'input' is missing; expected FP32 of [1..64, 1..512, 64]"),
        ({"inputs": [{}]}, 400, "'name' is None; expected a text"),
        ({"inputs": [GOOD | {"name": "x"}]}, 400, "there is no input 'x'; expected input"),
        ({"inputs": [GOOD, GOOD]}, 400, "input 'input' is there twice"),
        ({"inputs": [GOOD | {"datatype": "FP64"}]}, 400, "input 'input' is of datatype 'FP64'; expected FP32"),
        ({"inputs": [GOOD | {"datatype": {}}]}, 400, "input 'input' is of datatype {}; expected FP32"),
        ({"inputs": [GOOD | {"shape": [65, 1, HIDDEN]}]}, 400, "shape [65, 1, 64]; expected [1..64, 1..512, 64]"),
        ({"inputs": [GOOD | {"shape": [1, 0, HIDDEN]}]}, 400, "shape [1, 0, 64]; expected"),
        ({"inputs": [GOOD | {"shape": [1, 1]}]}, 400, "shape [1, 1]; expected"),
        ({"inputs": [GOOD | {"shape": [1, 1, 64, 1]}]}, 400, "shape [1, 1, 64, 1]; expected"),
        ({"inputs": [GOOD | {"shape": [1, True, HIDDEN]}]}, 400, "expected a list of integers"),
        ({"inputs": [GOOD | {"shape": "1,1,64"}]}, 400, "expected a list of integers"),
        ({"inputs": [GOOD | {"data": [1.0]}]}, 400, "input 'input' has 1 numbers; [1, 1, 64] has 64"),
        ({"inputs": [GOOD | {"data": None}]}, 400, "'data' is 'None'; expected a list of numbers"),
        ({"inputs": [GOOD | {"data": ["1"] * HIDDEN}]}, 400, "holds '1'; FP32 takes numbers"),
        ({"inputs": [GOOD | {"data": [True] * HIDDEN}]}, 400, "holds 'True'; FP32 takes numbers"),
        ({"inputs": [GOOD | {"data": [10**400] * HIDDEN}]}, 400, "holds numbers that are no FP32"),
        ({"inputs": [GOOD | {"data": [1e300] * HIDDEN}]}, 400, "holds numbers beyond 3.40282e+38, the largest of FP32"),
        ({"inputs": [GOOD | {"data": [[[[[0.5]]]]] * HIDDEN}]}, 400, "holds '[0.5]'; FP32 takes numbers"),
        ({"inputs": "\ud800"}, 400, "'inputs' is \ud800; expected a list of objects"),
        ({"inputs": [GOOD | {"parameters": []}]}, 200, ""),
        ({"inputs": [GOOD | {"parameters": [1]}]}, 400, "'parameters' is [1]; expected an object"),
        ({"inputs": [GOOD | {"parameters": {"binary_data_size": 4}}]}, 400, "binary_data_size 4; 0 bytes are left"),
        ({"inputs": [GOOD | {"parameters": {"binary_data_size": 0}}]}, 400, "has 0 bytes; FP32 of [1, 1, 64] has 256"),
        ({"inputs": [GOOD], "outputs": [{"name": "z"}]}, 400, "there is no output 'z'; expected output"),
        ({"inputs": [GOOD], "outputs": 3}, 400, "'outputs' is 3; expected a list of objects"),
        ({"inputs": [GOOD], "id": 3}, 400, "'id' is 3; expected a text"),
        ({"inputs": [GOOD | {"data": [1e38] * HIDDEN}]}, 400, "holds NaN or infinity, for which JSON has no number"),
        ({"inputs": [GOOD], "outputs": [{"name": "output"}], "id": "a"}, 200, ""),
    ],
)
def test_wrong_requests_are_told(body: Any, code: int, text: str, server: Server) -> None:
    found, answer, _ = server.ask(INFER, body)
    assert found == code, answer
    assert text in answer.get("error", "")


@pytest.mark.parametrize(
    ("path", "headers", "code", "text"),
    [
        ("/v2/models/other/infer", {}, 404, "there is no model other; this server has toy, version 1"),
        (f"/v2/models/{NAME}/versions/2/infer", {}, 404, "there is no model toy, version 2"),
        ("/v2/models/..%2f..%2fetc/infer", {}, 404, "there is no POST"),
        ("/v2/repository/models/toy/unload", {}, 404, "there is no POST"),
        ("/v2/health/ready", {}, 405, "there is no POST"),
        (INFER, {"Content-Encoding": "gzip"}, 415, "expected an uncompressed request"),
        (INFER, {LENGTH: "9999"}, 400, f"{LENGTH} is '9999'; expected at most the"),
        (INFER, {LENGTH: "-1"}, 400, f"{LENGTH} is '-1'"),
        (INFER, {LENGTH: "10"}, 400, "the request is no JSON"),
    ],
)
def test_wrong_paths_and_headers_are_told(
    path: str, headers: dict[str, str], code: int, text: str, server: Server
) -> None:
    found, answer, _ = server.ask(path, {"inputs": [GOOD]}, headers)
    assert found == code, answer
    assert text in answer["error"]


def test_bytes_after_the_inputs_are_told(server: Server) -> None:
    header = json.dumps({"inputs": [GOOD]}).encode()
    code, answer, _ = server.ask(INFER, header + b"1234", {LENGTH: str(len(header))})
    assert (code, answer["error"]) == (400, "the request has 4 bytes more than its inputs; check binary_data_size")


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (lambda made: setattr(made, "model_name", "other"), "NOT_FOUND", "there is no model other"),
        (lambda made: setattr(made, "model_version", "2"), "NOT_FOUND", "there is no model toy, version 2"),
        (lambda made: setattr(made.inputs[0], "name", "x"), "INVALID_ARGUMENT", "there is no input 'x'"),
        (lambda made: setattr(made.inputs[0], "datatype", "BF16"), "INVALID_ARGUMENT", "'BF16'; expected FP32"),
        (lambda made: made.inputs[0].shape.append(1), "INVALID_ARGUMENT", "shape [1, 1, 64, 1]; expected"),
        (lambda made: made.raw_input_contents.append(b""), "INVALID_ARGUMENT", "2 raw contents for 1 inputs"),
        (lambda made: made.ClearField("raw_input_contents"), "INVALID_ARGUMENT", "has 0 numbers; [1, 1, 64] has 64"),
        (lambda made: made.ClearField("inputs"), "INVALID_ARGUMENT", "1 raw contents for 0 inputs"),
        (lambda made: made.outputs.add(name="z"), "INVALID_ARGUMENT", "there is no output 'z'"),
    ],
)
def test_wrong_calls_are_told(change: Callable[[Any], object], code: str, text: str, channel: grpc.Channel) -> None:
    made = infer_request(torch.ones(1, 1, HIDDEN))
    change(made)
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, "ModelInfer", made)
    assert caught.value.code().name == code
    assert text in caught.value.details()


def test_results_that_json_cannot_say_go_as_bytes(server: Server, channel: grpc.Channel) -> None:
    x = torch.full((1, 1, HIDDEN), 1e38)
    assert not bool(by_bytes(server, channel, x).isfinite().all())
    assert not bool(by_grpc(server, channel, x).isfinite().all())


def test_metrics_count_requests_batches_and_kernels(server: Server, channel: grpc.Channel) -> None:
    def value(name: str) -> float:
        text = server.ask("/metrics")[1].decode()
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    names = (
        'kpt_requests_total{code="200",protocol="rest"}',
        'kpt_requests_total{code="400",protocol="rest"}',
        'kpt_requests_total{code="OK",protocol="grpc"}',
        "kpt_batch_requests_count",
        "kpt_kernel_calls_total{",
    )
    before = [value(name) for name in names]
    server.infer(torch.ones(1, 1, HIDDEN))
    server.ask(INFER, {})
    by_grpc(server, channel, torch.ones(1, 1, HIDDEN))
    moved = [value(name) - old for name, old in zip(names, before, strict=True)]
    assert moved == [1, 1, 1, 2, 4]


def test_half_a_float_and_long_integers_are_what_they_were() -> None:
    from kpt_serve.oip.requests import DTYPES, from_bytes, from_numbers, to_bytes, to_numbers
    from kpt_serve.package import Tensor

    for word, dtype in DTYPES.items():
        numbers: Any = [True, False, True] if dtype == torch.bool else [0, 1, 100]
        right = torch.tensor(numbers, dtype=dtype)
        metadata = Tensor("x", word, (3,))
        assert from_bytes(metadata, (3,), to_bytes(right)).equal(right), word
        assert from_numbers(metadata, (3,), to_numbers("x", right)).equal(right), word
    assert to_bytes(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)) == struct.pack("<2H", 0x3F80, 0xC000)
