"""FP8 checkpoints in memory: loaded they take their own bytes, and a forward widens one expert at a time at most."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_transformers_fp8 import qwen3, write

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a peak anew")

_MEASURE = """
import sys
import torch
from transformers import AutoModelForCausalLM

from kpt_core import use
from kpt_fp8.transformers import load as load_fp8

def read(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

def load(path, implementation):
    own = load_fp8 if implementation == "kpt" else AutoModelForCausalLM.from_pretrained
    return own(path, experts_implementation=implementation, dtype=torch.bfloat16)

def loaded(implementation):
    load(sys.argv[1], implementation)  # what is imported and made once
    before = read("RssAnon")
    model = load(sys.argv[2], implementation)
    print(read("RssAnon") - before)
    return model

def run(model, *backends):
    with torch.no_grad(), use(*backends):
        load(sys.argv[1], "kpt")(prompt)
        for parameter in model.parameters():
            getattr(parameter, "codes", parameter).view(torch.uint8).sum()  # else the file is read in the forward
        before = read("VmRSS")
        with open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")
        model(prompt)
        print(read("VmHWM") - before)

torch.set_num_threads(1)
prompt = torch.arange(8).unsqueeze(0)
model = loaded("kpt")
run(model)
run(model, "torch")
loaded("eager")
"""


@pytest.mark.slow
def test_weights_stay_8_bit(tmp_path):
    tiny = write(tmp_path / "tiny", qwen3(256, 128)).path
    path = write(tmp_path / "large", qwen3(1024, 1024)).path
    # Memory goes back to the system at once, so that a peak is what is held at that moment.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-c", _MEASURE, str(tiny), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    kept, taken, by_torch, dequantised = map(int, done.stdout.split()[-4:])
    stored = (path / "model.safetensors").stat().st_size
    two_experts = 2 * 3 * 1024 * 1024 * 4  # in float32, one of them for what a process takes besides; a layer has six
    assert kept < 1.15 * stored
    assert dequantised > 1.7 * stored  # what transformers does by itself, and how this test would fail
    assert taken < two_experts
    assert by_torch < two_experts
