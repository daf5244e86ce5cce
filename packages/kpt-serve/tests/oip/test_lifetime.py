"""How a server starts, whom it lets in, what it bears, and how it ends: no answer is lost."""

import datetime
import http.client
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import HIDDEN, NAME, Server, request
from test_answers import INFER, TYPES, by_grpc, call, infer_request

X = torch.linspace(-1, 1, 3 * HIDDEN).reshape(1, 3, HIDDEN)
SLOW = """
import time
from kpt_serve.oip.model import Model
run = Model.__call__
def slow(self, inputs):
    time.sleep({seconds})
    return run(self, inputs)
Model.__call__ = slow
"""


def test_requests_in_flight_are_answered_when_a_server_stops(package: Path) -> None:
    with Server(package, before=SLOW.format(seconds=0.05)) as server, ThreadPoolExecutor(32) as pool:
        answers = [pool.submit(server.infer, X) for _ in range(16)]
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            answers += [pool.submit(lambda: (200, by_grpc(server, channel, X))) for _ in range(16)]
            time.sleep(0.1)
            assert server.stop() == 0
            found = [each.result() for each in answers]
    assert [code for code, _ in found] == [200] * 32
    assert all(torch.allclose(numbers, found[0][1], atol=1e-5) for _, numbers in found)
    with pytest.raises(OSError, match="refused"):
        server.infer(X)


def test_while_it_settles_a_server_is_not_ready_and_answers(package: Path) -> None:
    with Server(package, settle=1.0) as server, closing(http.client.HTTPConnection("127.0.0.1", server.port)) as kept:
        kept.request("GET", "/v2/health/ready")
        assert kept.getresponse().read() == b'{"ready":true}'
        server.process.terminate()
        server.wait_for("not ready any more")
        assert server.ask("/v2/health/ready")[0] == 503
        assert server.ask("/v2/health/live")[0] == 200
        assert server.infer(X)[0] == 200
        assert server.process.wait(20) == 0


def test_a_killed_server_gives_the_same_bits_again(package: Path) -> None:
    found = []
    for _ in range(2):
        with Server(package) as server:
            found.append(server.infer(X)[1])
            server.process.kill()
    assert found[0].equal(found[1])


def test_a_token_is_asked_for_by_both_protocols_and_health_is_open(package: Path) -> None:
    with Server(package, token="secret") as server, grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        for headers in (
            {},
            {"Authorization": "Bearer secre"},
            {"Authorization": "secret"},
            {"Authorization": "Bearer"},
        ):
            code, answer, found = server.ask(INFER, request(X), headers)
            assert (code, found["WWW-Authenticate"]) == (401, "Bearer")
            assert "Bearer TOKEN" in answer["error"]
            assert server.ask(f"/v2/models/{NAME}", headers=headers)[0] == 401
        assert server.ask(INFER, request(X), {"Authorization": "Bearer secret"})[0] == 200
        assert [server.ask(path)[0] for path in ("/v2/health/live", "/v2/health/ready", "/metrics")] == [200] * 3
        with pytest.raises(grpc.RpcError) as caught:
            call(channel, "ModelInfer", infer_request(X))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        call(channel, "ModelInfer", infer_request(X), metadata=[("authorization", "Bearer secret")])
        assert call(channel, "ServerReady", TYPES["ServerReadyRequest"]()).ready


def test_tls(package: Path, tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    with Server(package, certificate=certificate, private_key=key) as server:
        trusted = ssl.create_default_context(cafile=certificate)
        assert server.ask(INFER, request(X), context=trusted)[0] == 200
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            server.ask("/v2/health/ready", context=ssl.create_default_context())
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(f"localhost:{server.grpc_port}", credentials) as channel:
            by_grpc(server, channel, X)


def _certificate(folder: Path) -> tuple[Path, Path]:
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return paths


def test_more_than_the_queue_holds_is_refused_at_once(package: Path) -> None:
    with Server(package, before=SLOW.format(seconds=0.3), queue=2, batch=1) as server, ThreadPoolExecutor(40) as pool:
        start = time.monotonic()
        answers = list(pool.map(lambda _: (*server.ask(INFER, request(X)), time.monotonic() - start), range(40)))
        refused = [each for each in answers if each[0] == 503]
        assert [each[0] for each in answers].count(200) >= 3
        assert len(refused) > 20
        assert {each[2]["Retry-After"] for each in refused} == {"1"}
        assert "2 requests wait already" in refused[0][1]["error"]
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            errors = [each for each in pool.map(lambda _: _status(channel), range(20)) if each is not None]
        assert set(errors) == {grpc.StatusCode.RESOURCE_EXHAUSTED}


def _status(channel: grpc.Channel) -> grpc.StatusCode | None:
    try:
        call(channel, "ModelInfer", infer_request(X))
    except grpc.RpcError as error:
        return error.code()
    return None


def test_large_slow_and_vanished_clients(package: Path) -> None:
    with Server(package, largest=100_000, body_seconds=2.0) as server:
        code, answer, _ = server.ask(INFER, b"x" * 5_000_000)
        assert (code, answer["error"]) == (413, "the request has more than 100000 bytes; send less, or in parts")
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel, pytest.raises(grpc.RpcError) as caught:
            call(channel, "ModelInfer", infer_request(torch.ones(8, 512, HIDDEN)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # The header says more bytes than ever come.
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{{".encode())
            slow.settimeout(10)
            answered = b"".join(iter(lambda: slow.recv(65536), b"")).decode()
        assert answered.startswith("HTTP/1.1 408")
        assert "did not arrive within 2 seconds; got 1 bytes" in answered
        assert server.infer(X)[0] == 200


def test_a_client_that_vanished_is_not_computed_for(package: Path) -> None:
    with Server(package, before=SLOW.format(seconds=0.8), batch=1) as server:
        busy = threading.Thread(target=server.infer, args=(X,))
        busy.start()
        time.sleep(0.2)  # until the model is at it
        body = f'{{"inputs": [{{"name": "input", "datatype": "FP32", "shape": [1, 1, 64], "data": {[0.5] * 64}}}]}}'
        gone = []
        for _ in range(5):
            connection = socket.create_connection(("127.0.0.1", server.port))
            connection.sendall(
                f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            gone.append(connection)
        time.sleep(0.1)
        for connection in gone:
            connection.close()
        busy.join()
        assert server.infer(X)[0] == 200
        text = server.ask("/metrics")[1].decode()
        assert 'kpt_requests_total{code="499",protocol="rest"} 5.0' in text
        assert "kpt_batch_requests_count 2.0" in text


def test_a_connection_that_asks_nothing_is_closed(package: Path) -> None:
    before = "import kpt_serve.listening as s; s.SILENT = 0.2"
    with Server(package, before) as server, socket.create_connection(("127.0.0.1", server.port)) as silent:
        silent.settimeout(5)
        assert silent.recv(1) == b""


FAILING = """
import kpt_backend_cpu.moe.decode, kpt_backend_cpu.moe.experts
def fail(*args, **kwargs):
    raise RuntimeError("planted")
kpt_backend_cpu.moe.decode.forward = fail
"""


def test_when_a_kernel_raises_the_next_one_serves_and_the_metrics_tell(package: Path) -> None:
    with Server(package, before=FAILING) as server:
        assert [server.infer(X)[0] for _ in range(4)] == [200] * 4
        lines = server.ask("/metrics")[1].decode().splitlines()
        assert [line for line in lines if line.startswith("kpt_kernel_quarantined") and line.endswith(" 1.0")]


BROKEN = """
from kpt_serve.oip.model import Model
run, calls = Model.__call__, []
def broken(self, inputs):
    calls.append(1)
    if len(calls) > {after}:
        raise RuntimeError("device-side assert triggered")
    return run(self, inputs)
Model.__call__ = broken
"""


def test_a_model_that_is_broken_for_good_is_not_live_any_more(package: Path) -> None:
    with Server(package, before=BROKEN.format(after=5)) as server:
        codes = [server.infer(X)[0] for _ in range(6)]
        assert codes[0] == 200
        assert codes[-1] == 503
        assert 500 in codes
        assert [server.ask(f"/v2/health/{word}")[0] for word in ("live", "ready")] == [503, 503]


def test_a_row_has_the_same_bits_in_every_batch_if_that_is_asked_for(package: Path) -> None:
    torch.manual_seed(1)
    rows = torch.randn(16, 4, HIDDEN)
    with Server(package, batch_invariant=True) as server:
        together = server.infer(rows)[1]
        alone = torch.cat([server.infer(row[None])[1] for row in rows])
    assert together.equal(alone)


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ({"unsigned": False}, 2, "nobody says who made it: give the public key"),
        ({"device_type": "cuda"}, 2, "toy runs on cpu; got 'cuda'"),
        ({"queue": 0}, 2, "queue is 0; expected at least 1"),
        ({"token": " "}, 2, "the token is empty"),
        ({"certificate": "cert.pem"}, 2, "TLS needs a certificate and its private key"),
        ({"host": "192.0.2.1"}, 2, "can't listen on 192.0.2.1:0"),
    ],
)
def test_what_cannot_be_served_is_told(options: dict[str, Any], code: int, text: str, package: Path) -> None:
    server = Server(package, **options)
    assert server.process.wait(60) == code
    assert text in server.log


def test_a_package_with_wrong_results_is_never_ready(package: Path, tmp_path: Path) -> None:
    import hashlib
    import json
    import shutil

    folder = tmp_path / "toy"
    shutil.copytree(package, folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = next(each for each in weights if each.endswith("1.weight"))
    weights[name] += 1
    save_file(weights, path)
    manifest = json.loads((folder / "kpt-package.json").read_text())
    for each in manifest["files"]:
        if each["path"] == path.name:
            each |= {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (folder / "kpt-package.json").write_text(json.dumps(manifest))
    server = Server(folder)
    assert server.process.wait(60) == 1
    assert "gives wrong results on this machine" in server.log
    assert "ready\n" not in server.log.replace("golden results are right", "")


@pytest.mark.parametrize(
    ("other", "rows"),
    [
        (lambda x: 1, 8),
        (lambda x: x[:1], 1),
        (lambda x: x[-1:], 1),
        (lambda x: x.mean(0), 1),
        (lambda x: x.sum() / 9, 1),
    ],
)
def test_rows_that_depend_on_each_other_are_not_joined(other: Any, rows: int, tmp_path: Path) -> None:
    from kpt_serve.oip.model import Model
    from kpt_serve.package import Manifest
    from kpt_serve.package.writing import write_program

    class Mean(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = x - other(x)
            return result

    write_program(tmp_path / "p", Mean(), torch.randn(3, 4), name="p", dynamic={"x": {0: (1, 16)}})
    manifest = Manifest.read(tmp_path / "p")
    assert Model(tmp_path / "p", manifest, "cpu").rows(manifest, 8) == rows


def test_the_description_of_the_protocol_is_its_source_compiled() -> None:
    """Every message and field of the source is in the compiled file, with its number."""
    import re
    from importlib.resources import files

    source = files("kpt_serve.oip").joinpath("open_inference.proto").read_text()
    fields = set(re.findall(r"(\w+) = (\d+);", source))
    found: set[tuple[str, str]] = set()

    def walk(descriptor: Any) -> None:
        found.update((field.name, str(field.number)) for field in descriptor.fields)
        for field in descriptor.fields:
            if field.message_type is not None and field.message_type.name not in seen:
                seen.add(field.message_type.name)
                walk(field.message_type)

    seen: set[str] = set()
    for message in TYPES.values():
        walk(message.DESCRIPTOR)
    assert found - {("key", "1"), ("value", "2")} == fields - {("syntax", "3")}
