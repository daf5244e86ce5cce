"""Check what is installed of kpt-backend-cpu: it computes natively, or says why not, and ops give the right result.

Run where the wheels are installed: `python tools/check_native.py`, or with the reason that `kpt doctor` must name
because there are no libraries: `python tools/check_native.py "KPT_CPU_BUILD=0"`.
"""

import json
import subprocess
import sys

import torch

import kpt_core
from kpt_backend_cpu import BACKEND


def faults(reason: str | None) -> list[str]:
    """Return what is wrong, a sentence each."""
    found = []
    unavailable = BACKEND.unavailable()
    told = subprocess.run([sys.executable, "-m", "kpt_cli", "doctor", "--json"], capture_output=True, check=False)
    states = {backend["name"]: backend["unavailable"] for backend in json.loads(told.stdout)["backends"]}
    if ("cpu", unavailable) not in states.items():
        found.append(f"`kpt doctor` does not say of the backend: {unavailable}")
    if reason is not None and reason not in (unavailable or ""):
        found.append(f"expected no libraries because of {reason!r}; the backend says {unavailable!r}")
    x, weight = torch.randn(7, 33), torch.randn(2, 33, 5)
    offsets = torch.tensor([3, 7], dtype=torch.int32)
    op = kpt_core.ops()["moe.grouped_mm"]
    ran = op.explain(x, weight, offsets)
    if (ran.backend == "cpu") is not (unavailable is None):
        found.append(f"{ran} ran, and the backend says {unavailable!r}")
    if not torch.allclose(op(x, weight, offsets), torch.cat([x[:3] @ weight[0], x[3:] @ weight[1]]), atol=1e-4):
        found.append(f"{ran} gives a wrong result")
    print(f"kpt-backend-cpu: {unavailable or 'ready'}; moe.grouped_mm ran {ran.kernel}")
    return found


if __name__ == "__main__":
    wrong = faults(sys.argv[1] if len(sys.argv) > 1 else None)
    print(*wrong, sep="\n", file=sys.stderr)
    raise SystemExit(1 if wrong else 0)
