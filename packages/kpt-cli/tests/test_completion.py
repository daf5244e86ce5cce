"""What the shell completes, and that it answers without torch."""

import json
import os
import subprocess
import sys

import pytest

import kpt_core
from kpt_cli.options import _declared, op_names

#: Lines whose last word is begun, and what completes it.
COMPLETED = {
    "be": {"bench"},
    "bench m": {"moe", "moe-training"},
    "bench moe --dtype b": {"bfloat16"},
    "bench moe --dty": {"--dtype"},
    "validate re": {"record", "replay"},
    "validate record --dtype b": {"bfloat16"},
    "demo --le": {"--level"},
    "demo --level a": {"aggressive"},
    "bisect --use g": {"grouped_mm"},
    "optimize --level ": {"conservative", "balanced", "aggressive"},
    "optimize --objective m": {"memory"},
    "plan --weights f": {"fp8"},
    "lock --device c": {"cpu", "cuda"},
    "kernels moe.g": {"moe.grouped_mm", "moe.grouped_mm_wgrad"},
    "tune moe.experts moe.t": {"moe.top_k_gating"},
}
LIGHT = """
import io
import json
import os
import sys
from contextlib import redirect_stdout, suppress

from kpt_cli.main import main

told = {}
for line in json.loads(sys.argv.pop()):
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = f"kpt {line}", str(len(line.split(" ")))
    with redirect_stdout(io.StringIO()) as answer, suppress(SystemExit):
        main()
    told[line] = answer.getvalue().split()
heavy = {"torch", "transformers", "kpt_core"} & set(sys.modules)
assert not heavy, heavy
print(json.dumps(told))
"""


def test_words_are_completed():
    command = [sys.executable, "-c", LIGHT, json.dumps(list(COMPLETED))]
    env = os.environ | {"_KPT_COMPLETE": "complete_bash"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    assert {line: set(words) for line, words in json.loads(done.stdout).items()} == COMPLETED


def test_every_op_that_is_installed_is_offered():
    installed = {name for name in kpt_core.ops() if name.startswith(("moe.", "fp8.", "attention."))}
    assert set(op_names()) >= installed >= {"moe.experts"}


@pytest.mark.parametrize(
    "source",
    ['@op("a.b")\ndef f(): ...', 'N = "a.b"\n@op(N, x=1)\ndef f(): ...', 'M, N = "c", "a.b"\nf = op(N)(g)'],
    ids=["written", "named", "named with another"],
)
def test_an_op_is_found_however_its_name_is_written(source):
    assert _declared(source) == {"a.b"}
