import json
import re
import subprocess
import sys

import pytest

import kpt_core
from cli_kernels import Backend
from kpt_core.registry import add_backend, remove_backend


@pytest.fixture
def backend():
    made = Backend()
    add_backend(made)
    yield made
    remove_backend("clitest")


@pytest.fixture
def rows(kpt, backend):
    def get(*arguments):
        result = kpt("kernels", "clitest.double", "--json", *arguments)
        assert result.exit_code == 0, result.output
        (op,) = json.loads(result.stdout)["ops"]
        return op, {row["kernel"]: row for row in op["kernels"]}

    return get


def test_every_kernel_is_listed_best_first_with_what_becomes_of_it(rows):
    op, kernels = rows()
    assert op["summary"] == "Multiply by two."
    assert list(kernels) == ["cli_kernels:hot", "cli_kernels:fast", "cli_kernels:picky"]
    assert kernels["cli_kernels:hot"] == {
        "backend": "clitest",
        "kernel": "cli_kernels:hot",
        "priority": 30,
        "requires": ["warp9"],
        "composed_of": [],
        "evidence": {},
        "on": {"cpu": "needs warp9, which cpu lacks"},
    }
    assert kernels["cli_kernels:fast"]["on"]["cpu"] == "float32: dtype float32; needs bfloat16; bfloat16: accepted"
    assert kernels["cli_kernels:picky"]["on"]["cpu"] == "accepted where it takes the call"
    assert op["reference_on"] == {"cpu": "accepted"}


def test_kernels_of_a_backend_whose_optional_third_party_is_absent_are_in_json_alone(kpt, rows, backend):
    backend.unavailable = lambda: "acme-lib is not installed; pip install acme-lib"
    said = kpt("kernels", "clitest.double").stdout
    assert "cli_kernels:fast" not in said
    assert said.endswith("Optional and not installed: acme-lib (for backend clitest)\n")
    _, kernels = rows()
    assert "acme-lib is not installed" in kernels["cli_kernels:fast"]["on"]["cpu"]


def test_explicit_choice_shows(rows, monkeypatch):
    monkeypatch.setenv("KPT_USE", "cli_kernels:picky")
    op, kernels = rows()
    assert "was asked for" in kernels["cli_kernels:fast"]["on"]["cpu"]
    assert "was asked for" in op["reference_on"]["cpu"]


def test_crooked_kernel_is_named_and_the_rest_is_shown(kpt, backend):
    backend.extra = (kpt_core.Kernel("clitest.double", "cli_kernels:crooked", priority=99),)
    kpt_core.refresh()
    result = kpt("kernels")
    assert result.exit_code == 0
    crooked = "kernel clitest/clitest.double/cli_kernels:crooked: could not be loaded: TypeError: missing"
    assert f"kpt: warning: {crooked}" in result.stderr
    assert "moe.experts" in result.stdout


def test_text_names_ops_kernels_and_reference(kpt, backend):
    result = kpt("kernels")
    assert result.exit_code == 0
    assert result.stderr == ""
    text = " ".join(result.stdout.split())
    for said in ("clitest.double", "Multiply by two.", "cli_kernels:hot", "warp9", "moe.grouped_mm", "reference"):
        assert said in text
    assert "kpt_moe.torch_kernels.experts_grouped:forward calls moe.grouped_mm, moe.grouped_mm_wgrad" in text
    assert max(map(len, result.stdout.splitlines())) <= 110


def test_one_op_shows_its_contract_and_nothing_else(kpt, backend):
    result = kpt("kernels", "clitest.double")
    assert "x: any floating tensor." in result.stdout
    assert "moe.experts" not in result.stdout


def test_json_of_all_ops(kpt):
    document = json.loads(kpt("kernels", "--json").stdout)
    assert {"moe.experts", "moe.grouped_mm"} <= {op["op"] for op in document["ops"]}
    assert document["devices"][0]["device"] == "cpu"
    assert document["problems"] == []


def test_what_reports_say_of_a_kernel_is_shown(kpt):
    document = json.loads(kpt("kernels", "moe.grouped_mm", "--json").stdout)
    found = {row["kernel"]: row["evidence"] for row in document["ops"][0]["kernels"]}
    told = found["kpt_moe.torch_kernels.grouped_mm:loop"]
    assert told
    form = re.compile(r"(ran|failed)( in part)? \d{4}-\d\d-\d\d ([0-9a-f]{7}|commit gone)")
    assert all(map(form.fullmatch, told.values()))
    assert "ran on" in kpt("kernels", "moe.grouped_mm").stdout


def test_misspelt_op_offers_the_nearest(kpt):
    result = kpt("kernels", "moe.expert")
    assert result.exit_code == 2
    assert "unknown op 'moe.expert': did you mean 'moe.experts'" in result.stderr
    assert result.stdout == ""


def test_kpt_use_of_an_unknown_backend_offers_the_nearest(kpt, monkeypatch, backend):
    monkeypatch.setenv("KPT_USE", "clitset")
    result = kpt("kernels")
    assert result.exit_code == 2
    assert "unknown backend or kernel 'clitset': did you mean 'clitest'?" in result.stderr


@pytest.mark.parametrize("variable", ["KPT_STRICT=maybe", "KPT_USE=moe.experts="])
def test_malformed_variable_is_named(kpt, monkeypatch, variable):
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    result = kpt("kernels")
    assert result.exit_code == 2
    assert name in result.stderr


def test_an_unknown_op_is_refused_before_torch_is_imported():
    code = "import sys; from kpt_cli.main import app\ntry: app(['kernels', 'moe.expert'])\n"
    code += "finally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    assert "unknown op 'moe.expert': did you mean moe.experts" in done.stderr
