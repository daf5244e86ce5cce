"""Importing the package, and using it, is free: no optional third party comes along."""

import json
import subprocess
import sys

FOREIGN = {"transformers", "triton", "jax", "pandas", "matplotlib", "flash_attn", "torch_xla", "safetensors"}

#: A fresh interpreter says after each step which top-level modules it has.
PROGRAM = """
import json, sys
def loaded():
    return sorted({name.partition(".")[0] for name in sys.modules})
import kpt_moe
steps = {"import": loaded()}
import kpt_moe.ops
steps["ops"] = loaded()
import torch
layer = kpt_moe.MoELayer(kpt_moe.MoEConfig(hidden_size=8, num_experts=2))
layer(torch.ones(3, 8)).sum().backward()
steps["use"] = loaded()
print(json.dumps(steps))
"""


def test_no_third_party_is_imported():
    result = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    steps = json.loads(result.stdout)
    assert {"kpt_moe", "kpt_core", "torch"} <= set(steps["import"])
    for step, modules in steps.items():
        assert FOREIGN.isdisjoint(modules), step
