"""Records, ratchet and docs/support.md are true, and say of every kernel what the records prove, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_support_table_is_what_the_records_prove() -> None:
    # By itself: other tests of this process define ops, which have no records, and may have asked for the interpreter.
    others = {name for name in os.environ if name.startswith("KPT_")} | {"TRITON_INTERPRET"}
    environment = {name: value for name, value in os.environ.items() if name not in others}
    command = [sys.executable, "-m", "kpt_conformance.evidence", "check"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
