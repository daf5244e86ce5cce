"""Take a model to production: train, optimise, export, sign, serve, release, meet a broken kernel, roll back.

    python examples/production_pipeline.py [FOLDER]

Clients ask all the time; at the end none of their answers is lost or wrong. Each step is checked, and the exit code is
1 if one does not do what it says. The alert needs Prometheus on the path, or its folder in KPT_PROMETHEUS: it is told
where it could not be shown. Two minutes on two cores. It needs `pip install 'kpt-serve[serve,sign]' kpt-cli`.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from threading import Thread
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_moe import MoEConfig, MoELayer
from kpt_optimize import Plan, apply_plan, optimize
from kpt_serve.client import Client, InferenceError

HIDDEN, CLASSES, NAME = 64, 16, "classifier"
#: A backend whose kernel is chosen before all others, and has one of two faults. It stands for an update of a machine.
FAULTY = """
import os
from kpt_core import Backend, Kernel, get_op

calls = 0

class Faulty(Backend):
    name, device_types = "faulty", ("cpu",)
    def kernels(self):
        return (Kernel("moe.experts", forward="faulty_backend:forward", dtypes={"float32"}, priority=100),)

BACKEND = Faulty()

def forward(call):
    global calls
    calls += 1
    if os.environ["FAULT"] == "wrong":
        return get_op("moe.experts").run_reference(call) * 1.5
    if calls > 50:  # right while the golden inputs are tried
        raise RuntimeError("illegal memory access")
    return get_op("moe.experts").run_reference(call)
"""


def make() -> nn.Sequential:
    """Make the model: it reads `[batch, tokens, HIDDEN]` and scores `CLASSES`."""
    torch.manual_seed(0)
    config = MoEConfig(hidden_size=HIDDEN, num_experts=8, top_k=2, intermediate_size=128)
    return nn.Sequential(MoELayer(config), nn.Linear(HIDDEN, CLASSES))


def task(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw inputs and the classes that a fixed network gives them."""
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(HIDDEN, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    x = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return x, teacher(x).argmax(-1)


def train(model: nn.Module, steps: int) -> float:
    """Train further, and return the accuracy on inputs that it has not seen."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        x, classes = task(512, seed=step)
        loss = F.cross_entropy(model.train()(x[None])[0], classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, classes = task(4096, seed=-1)
    with torch.no_grad():
        return float((model.eval()(x[None])[0].argmax(-1) == classes).float().mean())


def build() -> tuple[nn.Module, Tensor, dict[str, dict[int, tuple[int, int]]]]:
    """Return what `kpt export` takes: the trained model with its plan applied, an input, and the ranges of sizes."""
    model = make().eval()
    model.load_state_dict(torch.load(os.environ["WEIGHTS"]))
    planned = apply_plan(model, Plan.load(Path(os.environ["PLAN"])))
    return planned.model, torch.randn(2, 8, HIDDEN), {"input": {0: (1, 64), 1: (1, 512)}}


def kpt(*arguments: str | Path, **env: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "kpt_cli", *map(str, arguments)]
    return subprocess.run(command, env=os.environ | {k: str(v) for k, v in env.items()}, text=True, capture_output=True)


class Server:
    """A process of `kpt serve`; `fault` puts the broken backend on its path."""

    def __init__(self, stack: ExitStack, package: Path, key: Path, fault: str = "") -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", package.parent / f"{package.name}-{port}.log"
        env = {"FAULT": fault, "PYTHONPATH": str(package.parent / "faulty")} if fault else {}
        command = [sys.executable, "-m", "kpt_cli", "serve", str(package), "--key", str(key), "--port", str(port)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=os.environ | env, stdout=log, stderr=log)
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)

    def ready(self) -> bool:
        """Wait until the golden results were right, or the server has ended."""
        while self.process.poll() is None:
            try:
                with urlopen(f"{self.url}/v2/health/ready", timeout=5):
                    return True
            except (URLError, ConnectionError):
                time.sleep(0.1)
        return False

    def metric(self, pattern: str) -> float:
        """Return the sum of the metrics that a pattern matches."""
        with urlopen(f"{self.url}/metrics", timeout=5) as answer:
            return sum(float(found) for found in re.findall(rf"^{pattern} (\S+)$", answer.read().decode(), re.M))

    def stop(self) -> int:
        """Let it answer what it has accepted, and end."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


class Traffic(Thread):
    """A client that asks without a pause, whichever server is in service, and compares each answer."""

    def __init__(self, server: Server, expected: list[Tensor], x: Tensor) -> None:
        super().__init__(daemon=True)
        self.server, self.x = server, x
        self._expected = [each.numpy() for each in expected]  # of each version, before a rollout either is right
        self.answers = self.lost = self.wrong = 0
        self.goes_on = True

    def run(self) -> None:
        """Ask until it is told to stop."""
        while self.goes_on:
            server, client = self.server, Client(self.server.url, deadline=30)
            while self.goes_on and server is self.server:
                try:
                    found = client.infer(NAME, {"input": self.x.numpy()})["output"]
                except InferenceError:
                    self.lost += 1
                    continue
                self.answers += 1
                self.wrong += not any(np.allclose(found, each, atol=1e-4, rtol=1e-4) for each in self._expected)
            client.close()

    def over(self, seconds: float = 2.0) -> str:
        """Let clients ask for some time, and tell how many answers there were."""
        before = self.answers
        time.sleep(seconds)
        return f"{self.answers - before} answers, {self.lost} lost, {self.wrong} wrong"


def firing(folder: Path, url: str, stack: ExitStack) -> set[str] | None:
    """Return the alerts that Prometheus fires for a server with KPT's rules; None where there is no Prometheus."""
    program = shutil.which("prometheus", path=os.environ.get("KPT_PROMETHEUS")) or shutil.which("prometheus")
    if program is None:
        return None
    rules, target = files("kpt_serve") / "metrics" / "rules.yml", url.removeprefix("http://")
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: [{rules}]\n"
        f"scrape_configs: [{{job_name: kpt, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)
    for _ in range(60):
        time.sleep(0.5)
        try:
            with urlopen(f"http://127.0.0.1:{port}/api/v1/alerts", timeout=5) as answer:
                alerts = json.load(answer)["data"]["alerts"]
        except (URLError, ConnectionError):
            continue
        if found := {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}:
            return found
    return set()


def main(folder: Path, stack: ExitStack) -> int:
    """Run the steps, and print what each one did."""
    begin, failed = time.perf_counter(), []

    def step(text: str, *, right: bool) -> None:
        print(f"{time.perf_counter() - begin:5.1f} s  {'ok    ' if right else 'FAILED'}  {text}", flush=True)
        if not right:
            failed.append(text)

    for command in ("ecparam -name prime256v1 -genkey -noout -out key.pem", "ec -in key.pem -pubout -out key.pub.pem"):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    key = folder / "key.pub.pem"

    # Two versions of the model, trained, optimised, exported and signed.
    model, x = make(), torch.randn(2, 8, HIDDEN)
    expected, accuracies = [], []
    for version, steps in ((1, 40), (2, 160)):
        accuracies.append(train(model, steps))
        weights, plan = folder / f"v{version}.pt", folder / f"v{version}.plan.json"
        torch.save(model.state_dict(), weights)
        result = optimize(model, level="balanced", objective="latency", example_inputs=x)
        result.plan.save(plan)
        with torch.no_grad():
            expected.append(result.model(x))
        step(
            f"version {version} is trained ({accuracies[-1]:.1%} right) and optimised: "
            f"{sum(each.kept for each in result.plan.entries)} of {len(result.plan.entries)} rewrites were kept",
            right=accuracies[-1] == max(accuracies),
        )
        made = kpt(
            "export", f"{Path(__file__).stem}:build", "-o", folder / f"v{version}", "--name", NAME, "--plan", plan,
            "--sign", folder / "key.pem", WEIGHTS=weights, PLAN=plan, PYTHONPATH=Path(__file__).parent,
        )  # fmt: skip
        step(f"it is exported and signed: {made.stdout.partition(chr(10))[0]}{made.stderr}", right=not made.returncode)
        verified = kpt("export", "--verify", folder / f"v{version}", "--key", key)
        step(f"it is verified: {verified.stdout.partition(chr(10))[0]}{verified.stderr}", right=not verified.returncode)
    tampered = shutil.copytree(folder / "v1", folder / "tampered")
    (tampered / "model.safetensors").write_bytes((folder / "v2" / "model.safetensors").read_bytes())
    refused = kpt("export", "--verify", tampered, "--key", key)
    step(f"a package with other weights is refused: {refused.stderr.strip()[:120]}", right=refused.returncode == 2)

    # Version 1 is served; version 2 is released while clients ask.
    first = Server(stack, folder / "v1", key)
    step("version 1 is ready: its golden results are right here", right=first.ready())
    traffic = Traffic(first, expected, x)
    traffic.start()
    step(f"clients ask: {traffic.over()}", right=traffic.answers > 0)
    second = Server(stack, folder / "v2", key)
    step("version 2 is ready beside it", right=second.ready())
    traffic.server = second
    told = traffic.over()
    step(f"clients ask version 2, version 1 ends: {told}", right=first.stop() == 0)

    # The machine is updated with a backend whose kernel raises. KPT serves the call by the next kernel, and tells.
    info = folder / "faulty" / "faulty_backend-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kpt.backends]\nfaulty = faulty_backend:BACKEND\n")
    (info.parent / "faulty_backend.py").write_text(FAULTY)
    raising = Server(stack, folder / "v2", key, fault="raises")
    step("a server with the updated backend is ready: the kernel is right at first", right=raising.ready())
    traffic.server = raising
    for _ in range(30):
        told = traffic.over()
        failures = raising.metric(r'kpt_kernel_failures_total\{backend="faulty"[^}]*\}')
        off = raising.metric(r'kpt_kernel_quarantined\{backend="faulty"[^}]*\}')
        if off:
            break
    step(f"its kernel raised {failures:.0f} times and is off; clients ask: {told}", right=failures == 3 and off == 1)
    alerts = firing(folder, raising.url, stack)
    if alerts is None:
        step("NOT SHOWN: the alert, since there is no Prometheus here (set KPT_PROMETHEUS)", right=True)
    else:
        step(f"Prometheus fires {', '.join(alerts)}", right=alerts == {"KptKernelQuarantined"})
    traffic.server = second
    step(f"rolled back to the server before: {traffic.over()}", right=raising.stop() == 0)

    # The next update gives wrong numbers. The canary's golden results differ, so that it gets no clients.
    canary = Server(stack, folder / "v2", key, fault="wrong")
    step("a canary with wrong numbers never gets ready", right=not canary.ready() and canary.process.returncode == 1)
    wrong = [line.strip() for line in canary.log.read_text().splitlines() if "WRONG" in line or "faulty" in line]
    step(f"its log names the kernel: {'; '.join(wrong)}", right=len(wrong) == 2)
    told = traffic.over()
    traffic.goes_on = False
    traffic.join()
    step(f"in all {traffic.answers} answers: {told}", right=traffic.lost == traffic.wrong == 0)
    print(f"{'FAILED' if failed else 'done'} in {time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as servers:
        sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary).absolute(), servers))
