"""A cluster of two nodes on this machine, without network: what is lost when replicas and nodes come and go."""

import asyncio
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from load import CLIENTS, ROWS, Golden, Load

from kpt_serve.client import Client
from kpt_serve.errors import PackageError, ServeError
from kpt_serve.oip.server import Options
from kpt_serve.ray import Replica, deployment

# Ray's own warnings, and sockets that its processes leave to the end.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]
OPTIONS = Options(unsigned=True, batch=8)
#: Quicker than any production wants, so that the tests end.
SCALE = {"upscale_delay_s": 1, "downscale_delay_s": 2, "look_back_period_s": 2, "target_ongoing_requests": 3}
_NEW_NETWORK, _SET_FLAGS, _UP = 0x40000000, 0x8914, 0x1


def _network_off() -> bool:
    """Leave this thread, and what it starts, nothing but loopback; only root may."""
    if ctypes.CDLL(None).unshare(_NEW_NETWORK):
        return False
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    return True


class Cloud:
    """Two nodes, and an application that has two or three replicas on them."""

    def __init__(self, package: Path) -> None:
        from ray.cluster_utils import Cluster

        import ray

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self.second = self.cluster.add_node(num_cpus=3)  # one of two replicas at least is there
        ray.init(self.cluster.address, log_to_driver=False)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        from ray import serve

        http = {"host": "127.0.0.1", "port": port}
        serve.start(proxy_location="EveryNode", http_options=http, logging_config={"enable_access_log": False})
        self.package = package
        self.deploy(most=3)

    def deploy(self, most: int = 2) -> None:
        from ray import serve

        application = deployment(self.package, OPTIONS, replicas=(2, most), autoscaling=SCALE, health_check_period_s=2)
        serve.run(application, name="kpt")

    def running(self) -> int:
        """Return how many replicas Ray holds for good."""
        from ray import serve

        return serve.status().applications["kpt"].deployments["kpt"].replica_states.get("RUNNING", 0)

    def replicas(self, count: int) -> dict[str, dict[str, Any]]:
        """Return what each replica tells of itself, when so many answer; ask anew until then."""
        found: dict[str, dict[str, Any]] = {}
        until = time.monotonic() + 30
        while len(found) < count:
            assert time.monotonic() < until, found
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/stats", timeout=10) as answer:
                told = json.load(answer)
                found[told["replica"]] = told
        return found

    def close(self) -> None:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def cloud(package: Path) -> Iterator[Cloud]:
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", OMP_NUM_THREADS="1")
    off = _network_off()
    start = time.monotonic()
    made = Cloud(package)
    ROWS.append(f"two nodes with two replicas: {time.monotonic() - start:.1f} s; network {'off' if off else 'on'}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def golden(package: Path) -> Golden:
    return Golden(package)


def calls(told: dict[str, Any]) -> int:
    return sum(each["calls"] for each in told["kernels"] if each["backend"] != "reference")


def nothing_lost(load: Load) -> None:
    assert load.lost == []
    assert load.wrong == 0
    assert len(load.answers) > 16 * CLIENTS


def test_golden_results_are_right_on_each_replica(cloud, golden):
    before = cloud.replicas(2)
    with Load(cloud.url, golden, "none") as load:
        pass
    nothing_lost(load)
    after = cloud.replicas(2)
    assert len({each["process"] for each in after.values()}) >= 2
    for name, told in before.items():
        assert calls(after.get(name, told)) > calls(told), "a replica served nothing"


def test_more_clients_bring_a_replica_and_fewer_take_it(cloud, golden):
    with Load(cloud.url, golden, "scale up") as load, load.timed():
        load.wait_for(lambda: cloud.running() == 3)
        assert len(cloud.replicas(3)) == 3
    nothing_lost(load)
    with Load(cloud.url, golden, "scale down") as load, load.timed():
        load.keep(2)
        load.wait_for(lambda: cloud.running() == 2)
    nothing_lost(load)


def test_another_deployment_takes_over_under_load(cloud, golden):
    old = set(cloud.replicas(2))
    with Load(cloud.url, golden, "redeploy") as load, load.timed():
        cloud.deploy()
        load.wait_for(lambda: not old & set(cloud.replicas(2)))
    nothing_lost(load)


def test_a_killed_replica_loses_nothing(cloud, golden):
    name, told = next(iter(cloud.replicas(2).items()))
    with Load(cloud.url, golden, "replica killed") as load, load.timed():
        os.kill(told["process"], signal.SIGKILL)
        load.wait_for(lambda: name not in cloud.replicas(2))
    nothing_lost(load)
    assert load.retries, "nobody noticed: was it killed?"


def test_requests_that_are_too_many_are_told_to_wait(cloud, package, golden):
    from ray import serve

    options = Options(unsigned=True, batch=1, queue=1, token="secret", delay=0)
    serve.run(deployment(package, options, name="small"), name="small", route_prefix="/small")
    url = f"{cloud.url}/small"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url}/stats")
    assert refused.value.code == 401

    def ask(_: object) -> tuple[int, str | None]:
        request = urllib.request.Request(f"{url}/v2/models/toy", headers={"Authorization": "Bearer secret"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, None
        except urllib.error.HTTPError as error:
            return error.code, error.headers.get("Retry-After")

    def infer(place: int) -> bool:
        with closing(Client(url, token="secret")) as client:
            return golden.ask(client, place)

    with ThreadPoolExecutor(32) as pool:
        answers = set(pool.map(ask, range(200)))
        assert all(pool.map(infer, range(32)))
    assert answers == {(200, None), (503, "1")}
    serve.delete("small")


def test_a_killed_node_loses_nothing(cloud, golden):
    there = {name for name, told in cloud.replicas(2).items() if told["node"] == cloud.second.node_id}
    assert there
    with Load(cloud.url, golden, "node killed") as load, load.timed():
        cloud.cluster.remove_node(cloud.second, allow_graceful=False)
        load.wait_for(lambda: not there & set(cloud.replicas(1)))
    nothing_lost(load)
    assert load.retries, "nobody noticed"


def test_a_changed_package_is_refused_before_torch_is_imported(package, tmp_path):
    changed = Path(shutil.copytree(package, tmp_path / "changed"))
    weights = bytearray((changed / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (changed / "model.safetensors").write_bytes(weights)
    with pytest.raises(PackageError, match=r"'model\.safetensors' was changed"):
        deployment(changed, OPTIONS)
    program = (
        "import sys\nfrom kpt_serve.ray import *\nfrom kpt_serve.ray import Replica\n"
        "try: Replica(sys.argv[1], Options(unsigned=True))\n"
        "except Exception as error: print(type(error).__name__, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(changed)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["PackageError", "False"]


def test_a_program_without_a_signature_is_refused(package):
    with pytest.raises(ServeError, match="public key"):
        deployment(package)


def test_a_replica_that_computes_something_else_is_not_healthy(package):
    replica = Replica(str(package), OPTIONS)
    asyncio.run(replica.check_health())
    right = replica._model._run
    replica._model._run = lambda inputs: {name: tensor * 1.5 for name, tensor in right(inputs).items()}
    with pytest.raises(RuntimeError, match="golden input"):
        asyncio.run(replica.check_health())
    assert not replica._service.ready
