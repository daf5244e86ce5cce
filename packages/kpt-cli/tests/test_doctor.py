import json
import sysconfig
from pathlib import Path

import pytest
import torch

import kpt_core
from cli_kernels import Backend
from kpt_core.registry import add_backend, remove_backend
from kpt_optimize.devices.machine import Device, Present


@pytest.fixture
def backend():
    made = Backend()
    add_backend(made)
    yield made
    remove_backend("clitest")


def document(kpt, code=0):
    result = kpt("doctor", "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def servings(found, op="clitest.double"):
    (entry,) = [entry for entry in found["ops"] if entry["op"] == op]
    return {each["dtype"]: each for each in entry["servings"] if each["device"] == "cpu"}


def test_healthy_machine(kpt):
    found = document(kpt)
    assert found["ok"] is True
    assert found["problems"] == []
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["device"] == "cpu"
    assert found["devices"][0]["name"]
    assert found["devices"][0]["memory_bytes"] > 2**28
    assert {"kpt-core", "kpt-cli", "kpt-moe"} <= {package["name"] for package in found["packages"]}
    assert found["third_parties"]["transformers"] is not None
    assert servings(found, "moe.experts")["float32"]["runs"] == ["kpt_moe.torch_kernels.experts_loop:forward"]
    assert servings(found, "moe.top_k_gating")["float32"]["runs"] == ["reference"]


def test_what_has_reached_its_end_is_named(kpt, monkeypatch):
    assert not any("archived" in advice for advice in document(kpt)["advice"])
    versions = {"intel-extension-for-pytorch": "2.8.0"}
    monkeypatch.setattr("kpt_cli.doctor.installed_version", versions.get)
    (advice,) = (advice for advice in document(kpt)["advice"] if "archived" in advice)
    assert advice.startswith("intel-extension-for-pytorch 2.8.0 is archived upstream since March 2026")


def test_text_ends_with_the_verdict(kpt, backend, monkeypatch):
    monkeypatch.setenv("PATH", sysconfig.get_path("scripts"))  # a namesake of kpt would be told of in a long sentence
    result = kpt("doctor")
    assert result.exit_code == 0
    assert result.stdout.endswith("All is well.\n")
    for said in ("Installed", "Devices", "Backends", "What runs", "clitest.double", "ready"):
        assert said in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 130


def test_what_runs_is_the_chain_that_can_be_reached(kpt, backend):
    found = servings(document(kpt))
    assert found["bfloat16"]["runs"] == ["cli_kernels:fast"]
    assert found["float32"]["runs"] == ["cli_kernels:picky", "reference"]
    refused = {each["kernel"]: each["reason"] for each in found["float32"]["refused"]}
    assert refused["cli_kernels:hot"] == "needs warp9, which cpu lacks"
    text = " ".join(kpt("doctor").stdout.split())
    assert "clitest.double cpu float32 cli_kernels:picky if it takes the call else reference" in text
    assert "cli_kernels:hot: needs warp9, which cpu lacks" in text


def test_capabilities_and_origin_of_a_backend(kpt, backend):
    (state,) = [state for state in document(kpt)["backends"] if state["name"] == "clitest"]
    assert state["capabilities"] == {"cpu": ["bf16"]}
    assert (state["origin"], state["device_types"]) == ("added by this process", ["cpu"])


def test_plain_pytorch_is_a_backend_that_is_always_ready_and_stands_last(kpt, monkeypatch):
    made = Backend()
    made.name = "zap"
    add_backend(made)
    try:
        *_, before, last = document(kpt)["backends"]
    finally:
        remove_backend("zap")
    assert (before["name"], last["name"]) == ("zap", "torch")
    assert (last["unavailable"], last["capabilities"]) == (None, {"cpu": ["host_memory"]})
    assert "No vendor's backend is installed" in kpt("doctor").stdout


def test_unavailable_backend_is_no_problem(kpt, backend):
    backend.unavailable = lambda: "no driver is loaded"
    result = kpt("doctor")
    assert result.exit_code == 0
    assert "no driver is loaded" in result.stdout


def test_a_backend_whose_optional_third_party_is_absent_is_one_dim_line(kpt, backend, monkeypatch):
    monkeypatch.setattr("kpt_cli.doctor.THIRD_PARTIES", ("intel-extension-for-pytorch", "acme-lib"))
    backend.unavailable = lambda: "Acme_Lib is not installed; pip install it"
    said = " ".join(kpt("doctor").stdout.split())
    optional = said.partition("Optional and not installed: ")[2].partition(" Devices ")[0]
    assert "acme-lib (for backend clitest)" in optional
    assert said.lower().count("acme") == 1
    assert "cli_kernels" not in said
    (state,) = [state for state in document(kpt)["backends"] if state["name"] == "clitest"]
    assert state["unavailable"].startswith("Acme_Lib is not installed")


@pytest.mark.parametrize(
    ("device_types", "reason"),
    [
        (("cpu",), "torch is not installed beside the version that it was built for"),
        (("cpu",), "no driver is loaded"),
        (("xpu",), "acme-lib is not installed; pip install acme-lib"),
    ],
    ids=["installed", "no third party", "for an accelerator"],
)
def test_other_backends_that_cannot_run_keep_their_row(kpt, backend, device_types, reason):
    backend.device_types, backend.unavailable = device_types, lambda: reason
    said = " ".join(kpt("doctor").stdout.split())
    assert "for backend clitest" not in said
    assert " ".join(reason.split()[:2]) in said


def test_backend_that_raises_is_a_problem(kpt, backend):
    def unavailable():
        raise RuntimeError("driver went away")

    backend.unavailable = unavailable
    found = document(kpt, code=1)
    assert any("clitest" in problem and "driver went away" in problem for problem in found["problems"])


def test_kernel_that_cannot_be_loaded_is_a_problem(kpt, backend):
    backend.extra = (kpt_core.Kernel("clitest.double", "cli_kernels:nowhere", priority=99),)
    found = document(kpt, code=1)
    assert found["ok"] is False
    (problem,) = found["problems"]
    assert "cli_kernels:nowhere" in problem
    assert servings(found)["bfloat16"]["runs"] == ["cli_kernels:fast"]


@pytest.mark.parametrize("role", ["forward", "backward", "unsupported"])
def test_kernel_that_can_not_be_called_is_a_problem(kpt, backend, role):
    functions = {"forward": "cli_kernels:another", role: "cli_kernels:crooked"}
    backend.extra = (kpt_core.Kernel("clitest.double", priority=99, **functions),)
    found = document(kpt, code=1)
    (problem,) = found["problems"]
    assert f"kernel clitest/clitest.double/{functions['forward']}: could not be loaded: TypeError: " in problem
    result = kpt("doctor")
    assert result.exit_code == 1
    assert "1 problem found." in result.stdout


def test_backend_whose_kernels_raise_is_a_problem(kpt, backend):
    def kernels():
        raise ValueError("no table")

    backend.kernels = kernels
    assert any("no table" in problem for problem in document(kpt, code=1)["problems"])


@pytest.mark.filterwarnings("default::kpt_core.KptWarning")
def test_environment_is_shown_and_slips_are_told(kpt, backend, monkeypatch):
    monkeypatch.setenv("KPT_DISABEL", "clitest")
    monkeypatch.setenv("KPT_DISABLE", "clitset, cli_kernels:fast")
    found = document(kpt)
    assert found["environment"] == {"KPT_DISABEL": "clitest", "KPT_DISABLE": "clitset, cli_kernels:fast"}
    assert any("did you mean KPT_DISABLE?" in advice for advice in found["advice"])
    assert "'clitset': did you mean 'clitest'" in kpt("doctor").stderr
    assert servings(found)["bfloat16"]["runs"] == ["cli_kernels:picky", "reference"]
    assert "KPT_DISABEL=clitest" in kpt("doctor").stdout


def test_another_program_named_kpt_is_told_of(kpt, monkeypatch, tmp_path):
    (tmp_path / "kpt").touch(mode=0o755)
    for folder, told in ((Path(sysconfig.get_path("scripts")), False), (tmp_path, True)):
        program = folder / "kpt"
        assert program.exists()
        monkeypatch.setenv("PATH", str(folder))
        advice = json.loads(kpt("doctor", "--json").stdout)["advice"]
        assert any(f"PATH finds is {program}" in each and "-m kpt_cli" in each for each in advice) == told


def test_explicit_reference(kpt, backend, monkeypatch):
    monkeypatch.setenv("KPT_USE", "reference")
    found = servings(document(kpt))["bfloat16"]
    assert (found["runs"], found["explicit"]) == (["reference"], "reference")


def test_accelerator_without_a_backend_gets_advice(kpt, monkeypatch):
    there = Present(
        (
            Device(device="cpu", name="a CPU", memory_bytes=None, features=()),
            Device(device="mtia:0", name="a GPU", memory_bytes=2**34, features=()),
            Device(device="mtia:1", name="a GPU", memory_bytes=2**34, features=()),
        ),
        ("the driver is old",),
    )
    monkeypatch.setattr("kpt_optimize.devices.machine.present", lambda: there)
    found = document(kpt)
    assert [device["device"] for device in found["devices"]] == ["cpu", "mtia:0", "mtia:1"]
    assert {each["device"] for each in found["ops"][-1]["servings"]} == {"cpu", "mtia:0"}
    assert any("A backend for mtia:0 would serve" in advice for advice in found["advice"])
    assert found["notes"] == ["the driver is old"]
    assert "the driver is old" in kpt("doctor").stdout


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KPT_USE", "foo", "KPT_USE=foo: no name 'foo' is installed (`kpt kernels` lists all)"),
        ("KPT_USE", "clitets", "no name 'clitets' is installed (did you mean clitest?)"),
        ("KPT_USE", "no.such.op=reference", "no op 'no.such.op' is installed"),
        ("KPT_STRICT", "yes", "KPT_STRICT='yes': expected 0 or 1"),
    ],
)
def test_variable_that_every_op_refuses_is_a_problem_and_the_rest_is_shown(
    kpt, backend, monkeypatch, name, value, said
):
    monkeypatch.setenv(name, value)
    found = document(kpt, code=1)
    (problem,) = found["problems"]
    assert said in problem
    assert found["environment"] == {name: value}
    assert servings(found)["bfloat16"]["runs"] == ["cli_kernels:fast"]
    result = kpt("doctor")
    assert result.exit_code == 1
    assert said in " ".join(result.stdout.split())
    assert "What runs" in result.stdout
    assert result.stderr == ""
