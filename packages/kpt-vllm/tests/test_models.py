"""Whole models by vLLM, with KPT's experts and without: each in a process of its own."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch

from models import save_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of what transformers imports
GENERATE = Path(__file__).with_name("generate.py")
FAMILIES = {
    "Qwen3Moe": {"intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "head_dim": 32},
    "Mixtral": {"intermediate_size": 32, "num_local_experts": 4},
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / request.param, request.param, **FAMILIES[request.param])


def environment(ours: bool, **more: str) -> dict[str, str]:
    return os.environ | {"KPT_VLLM": str(int(ours)), "VLLM_CPU_KVCACHE_SPACE": "1", **more}


def generate(folder: Path, ours: bool, **options: object) -> dict[str, object]:
    env = environment(ours, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    command = [sys.executable, str(GENERATE), str(folder), json.dumps({"enforce_eager": True, **options})]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def test_tokens_are_those_of_vllm_and_native_kernels_made_them(folder):
    ours, theirs = (generate(folder, each, dtype="float32") for each in (True, False))
    assert ours["tokens"] == theirs["tokens"]
    assert len({token for tokens in ours["tokens"] for token in tokens}) > 5
    assert theirs["kernels"] == {}
    assert {kernel.partition("/")[0] for kernel in ours["kernels"]} == {"cpu"}
    # A layer is called once for the prompts and once for each token after the first, unless that is split.
    assert sum(ours["kernels"].values()) >= 2 * 12


def test_openais_client_is_answered(tmp_path):
    from openai import OpenAI

    folder = save_model(tmp_path / "toy", "Qwen3Moe", torch.bfloat16, **FAMILIES["Qwen3Moe"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    # The command `vllm` of vllm-cpu 0.32.0 asks for the version of a distribution `vllm`, which is not there.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    # Compiled, as a user has it.
    command += ["--port", address.rpartition(":")[2], "--served-model-name", "toy", "--max-model-len", "128"]
    log = tmp_path / "log"
    with log.open("w") as told:
        process = subprocess.Popen(command, env=environment(True), stdout=told, stderr=told)
        try:
            for _ in range(600):
                assert process.poll() is None, log.read_text()
                try:
                    with urlopen(f"{address}/health"):
                        break
                except (URLError, ConnectionError):
                    time.sleep(0.5)
            with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
                answer = client.completions.create(model="toy", prompt="Hello", max_tokens=12, temperature=0)
        finally:
            process.terminate()
            process.wait(60)
    assert answer.usage.completion_tokens == 12
    assert len(answer.choices[0].text) == 12
    assert "KPT's kernels run the experts" in log.read_text()
