"""docs/support.md, and what `kpt kernels` shows, say of every kernel what the reports in evidence/ say."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_support_table_says_what_the_reports_say() -> None:
    # By itself: other tests of this process define ops, and may have asked for the interpreter.
    others = {name for name in os.environ if name.startswith("KPT_")} | {"TRITON_INTERPRET"}
    environment = {name: value for name, value in os.environ.items() if name not in others}
    command = [sys.executable, "-m", "kpt_conformance.support", "check"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
