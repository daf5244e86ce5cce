"""The contracts for chips of AMD hold, found in a process of its own: the interpreter, on here, compiles nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.environ.get("KPT_AOT") != "1", reason="compiles for minutes; `nox -s aot` runs this")


@pytest.mark.parametrize("chip", ["gfx90a", "gfx942", "gfx950"])
def test_every_contract_holds(chip):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "amd_declared.py"), chip],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert f"  {chip}  " in done.stdout
