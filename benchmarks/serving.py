"""Requests per second of `kpt serve` beside KServe's server, with the same program, clients and bytes.

    python benchmarks/serving.py PACKAGE [--seconds 10] [--rounds 5] [--json FILE] [--kserve PYTHON]

Each round starts nothing anew: all servers run at once, idle but for the one that is asked, in turn. PYTHON is one that
has kserve besides kpt-serve. Its servers run the same program by the same code, each request by itself, as it comes,
and once more behind kpt-serve's own queue: the difference between that and `kpt serve` is the protocol's alone.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch
from safetensors.torch import load_file

from kpt_serve.oip.grpc import messages
from kpt_serve.package import Manifest

CLIENTS = (1, 32)
SERVE = """
import logging, sys
from kpt_serve.oip.server import Options, serve
logging.basicConfig(level="INFO", stream=sys.stderr)
sys.exit(serve(sys.argv[1], Options(port=0, grpc_port=0, unsigned=True)))
"""
#: What a user of KServe writes; its servers read the program's arguments, so these are taken away before.
KSERVE = """
import asyncio, sys
folder, port, grpc_port, batched = sys.argv[1:]
sys.argv[1:] = ["--http_port", port, "--grpc_port", grpc_port, "--configure_logging", "false"]
import kserve, torch
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer
from kserve.utils.utils import generate_uuid
from kpt_serve.oip.batching import Batcher
from kpt_serve.package import Manifest
from kpt_serve.package.golden import load_model
class Toy(Model):
    def __init__(self):
        manifest = Manifest.read(folder)
        super().__init__(manifest.name)
        self.manifest, self.run = manifest, load_model(folder, manifest, "cpu")
        self.batcher = Batcher(self.run, rows=32, delay=0.002, queue=256) if batched == "batched" else None
        self.ready = True
    def load(self):
        return True
    async def predict(self, payload, headers=None, response_headers=None):
        inputs = {each.name: torch.from_numpy(each.as_numpy().copy()) for each in payload.inputs}
        results = await self.batcher.submit(inputs) if self.batcher else self.run(inputs)
        outputs = []
        for each in self.manifest.outputs:
            output = InferOutput(each.name, list(results[each.name].shape), each.datatype)
            output.set_data_from_numpy(results[each.name].numpy(), binary_data=True)
            outputs.append(output)
        return InferResponse(payload.id or generate_uuid(), self.name, outputs)
ModelServer(workers=1, enable_grpc=True).start([Toy()])
"""


@dataclass
class Peer:
    """A server and where it listens."""

    name: str
    port: int
    grpc_port: int


def start(stack: ExitStack, name: str, command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a server that ends with the stack."""
    file = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(command, stderr=file, stdout=file, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def stop() -> None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()

    stack.callback(stop)
    return process


def wait_for(process: subprocess.Popen[bytes], log: Path, ready: Callable[[], Any]) -> Any:
    """Return what `ready` gives, once it gives something."""
    for _ in range(1200):
        if process.poll() is not None:
            break
        try:
            if found := ready():
                return found
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"a server did not start:\n{log.read_text()[-3000:]}")


def http_request(manifest: Manifest, x: torch.Tensor) -> bytes:
    """Return a whole request, with the input as bytes."""
    raw = x.numpy().tobytes()
    one = {"name": manifest.inputs[0].name, "datatype": manifest.inputs[0].datatype, "shape": list(x.shape)}
    one["parameters"] = {"binary_data_size": len(raw)}
    header = json.dumps({"id": "1", "inputs": [one], "parameters": {"binary_data_output": True}}).encode()
    head = f"POST /v2/models/{manifest.name}/infer HTTP/1.1\r\nHost: localhost\r\n"
    head += "Content-Type: application/octet-stream\r\n"
    head += f"Inference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(header) + len(raw)}\r\n\r\n"
    return head.encode() + header + raw


async def rest(peer: Peer, clients: int, ask: bytes, until: Callable[[], bool]) -> list[float]:
    """Return the seconds of each request of some clients, each of which sends the next when it has an answer."""

    async def client() -> list[float]:
        reader, writer = await asyncio.open_connection("127.0.0.1", peer.port)
        seconds = []
        while not until():
            begin = time.perf_counter()
            writer.write(ask)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1").lower()
            if not head.startswith("http/1.1 200"):
                raise SystemExit(f"{peer.name} answers {head}")
            await reader.readexactly(int(re.search(r"\r\ncontent-length: (\d+)", head)[1]))  # type: ignore[index]
            seconds.append(time.perf_counter() - begin)
        writer.close()
        return seconds

    return [each for part in await asyncio.gather(*(client() for _ in range(clients))) for each in part]


async def rpc(peer: Peer, clients: int, ask: bytes, until: Callable[[], bool]) -> list[float]:
    """Likewise by gRPC, a connection for each client."""

    async def client(number: int) -> list[float]:
        options = [("kpt.client", number)]  # channels of the same options would share a connection
        seconds = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{peer.grpc_port}", options=options) as channel:
            call: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            while not until():
                begin = time.perf_counter()
                await call(ask)
                seconds.append(time.perf_counter() - begin)
        return seconds

    return [each for part in await asyncio.gather(*map(client, range(clients))) for each in part]


def batches(peer: Peer) -> tuple[float, float]:
    """Return how many requests and calls a server of ours has counted."""
    with urllib.request.urlopen(f"http://127.0.0.1:{peer.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = [re.search(rf"^kpt_batch_requests_{word} (\S+)", text, re.M) for word in ("sum", "count")]
    return float(found[0][1]), float(found[1][1])  # type: ignore[index]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kserve", default=sys.executable)
    options = parser.parse_args()
    manifest = Manifest.read(options.package)
    x = load_file(options.package / "golden.safetensors")[f"0/input/{manifest.inputs[0].name}"][:1].contiguous()
    made = messages()["ModelInferRequest"](model_name=manifest.name, raw_input_contents=[x.numpy().tobytes()])
    made.inputs.add(name=manifest.inputs[0].name, datatype=manifest.inputs[0].datatype, shape=x.shape)
    asks = {"REST": (rest, http_request(manifest, x)), "gRPC": (rpc, made.SerializeToString())}
    rows: dict[tuple[str, str, int], list[dict[str, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = folder / "kpt.log"
        process = start(stack, "kpt serve", [sys.executable, "-c", SERVE, str(options.package)], log)
        pattern = r"http://127.0.0.1:(\d+), gRPC on (\d+)(?s:.*)ready\n"
        found = wait_for(process, log, lambda: re.search(pattern, log.read_text()))
        peers = [Peer("kpt serve", int(found[1]), int(found[2]))]
        for number, word in enumerate(("single", "batched")):
            peer = Peer(f"kserve, {word}", 18180 + 2 * number, 18181 + 2 * number)
            log = folder / f"{word}.log"
            ports = [str(peer.port), str(peer.grpc_port), word]
            process = start(stack, peer.name, [options.kserve, "-c", KSERVE, str(options.package), *ports], log)
            url = f"http://127.0.0.1:{peer.port}/v2/models/{manifest.name}/ready"
            wait_for(process, log, lambda url=url: urllib.request.urlopen(url, timeout=5).status == 200)  # type: ignore[misc]
            peers.append(peer)
        for _ in range(options.rounds):
            for protocol, (ask, body) in asks.items():
                for clients in CLIENTS:
                    for peer in peers:
                        before = batches(peer) if peer is peers[0] else (0, 0)
                        seconds = measured(ask, peer, clients, body, options.seconds)
                        after = batches(peer) if peer is peers[0] else (0, 0)
                        row = {"requests_per_second": len(seconds) / options.seconds}
                        row["p50_ms"] = 1e3 * statistics.median(seconds)
                        row["p99_ms"] = 1e3 * sorted(seconds)[int(0.99 * len(seconds))]
                        calls = after[1] - before[1]
                        row["mean_batch"] = (after[0] - before[0]) / calls if calls else 0
                        rows.setdefault((protocol, peer.name, clients), []).append(row)
    report = []
    print(f"{'':6}{'server':18}{'clients':>8}{'req/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'batch':>7}")
    for (protocol, name, clients), runs in rows.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        report.append({"protocol": protocol, "server": name, "clients": clients, "n": len(runs), **middle})
        print(
            f"{protocol:6}{name:18}{clients:8}{middle['requests_per_second']:9.0f}{middle['p50_ms']:9.2f}"
            f"{middle['p99_ms']:9.2f}{middle['mean_batch'] or float('nan'):7.1f}"
        )
    if options.json is not None:
        about = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "rows": report}
        options.json.write_text(json.dumps(about, indent=1) + "\n")


def measured(
    ask: Callable[[Peer, int, bytes, Callable[[], bool]], Awaitable[list[float]]],
    peer: Peer,
    clients: int,
    body: bytes,
    seconds: float,
) -> list[float]:
    """Return the seconds of each request within some time, after a tenth of it that does not count."""

    async def run(length: float) -> list[float]:
        end = time.perf_counter() + length
        return await ask(peer, clients, body, lambda: time.perf_counter() >= end)

    asyncio.run(run(seconds / 10))
    return asyncio.run(run(seconds))


if __name__ == "__main__":
    main()
