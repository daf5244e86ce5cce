import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import models
from kpt_serve.errors import PackageError
from kpt_serve.package import Manifest, describe_file
from kpt_serve.package.golden import Golden, main, verify
from kpt_serve.package.writing import finish, write_program

KERNELS = {"moe": "moe.experts by ", "fp8": "fp8.linear by "}


@pytest.fixture(scope="module", params=["own", "moe", "fp8"])
def written(request, tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("packages") / request.param
    model, inputs, dynamic = getattr(models, request.param)()
    write_program(folder, model, inputs, name=request.param, dynamic=dynamic)
    return folder


@pytest.fixture
def package(written, tmp_path):
    """Return a copy that may be changed."""
    return shutil.copytree(written, tmp_path / written.name)


def sealed(folder):
    """Write the manifest anew, with the checksums of what is there now."""
    finish(folder, Manifest.read(folder))


def test_a_package_gives_its_golden_results_at_every_size(written, capsys):
    report = verify(written)
    assert report.passed
    assert len(report.sizes) == 3
    assert "1x1" in report.sizes[1]
    assert all(0 <= error.mean <= 1e-6 for error in report.errors)
    assert sum(report.kernels.values()) >= (3 if written.name in KERNELS else 0)
    assert any(kernel.startswith(KERNELS.get(written.name, "")) for kernel in (*report.kernels, ""))
    assert main([str(written)]) == 0
    assert "right; mean error" in capsys.readouterr().out


def test_kernels_of_another_machine_are_right_too(written):
    import kpt_core

    with kpt_core.use("reference"):
        assert verify(written).passed


def test_a_wrong_weight_with_right_checksums_is_found(package, capsys):
    weights = load_file(package / "model.safetensors")
    name = next(name for name in weights if name.endswith(("bias", "scale")) or "router" in name)
    weights[name] = weights[name] * 1.01 + 0.01
    save_file(weights, package / "model.safetensors")
    sealed(package)
    assert main([str(package)]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_a_nan_is_wrong(package):
    golden = Golden.read(package)
    next(each for each in golden.outputs[0].values() if each.is_floating_point()).fill_(float("nan"))
    golden.write(package)
    sealed(package)
    assert not verify(package).passed


def test_weights_of_another_model_are_refused_before_they_run(package, capsys):
    weights = load_file(package / "model.safetensors")
    name = sorted(weights)[0]
    for changed, told in (
        ({**weights, "more": torch.ones(1)}, "holds other weights than the program takes, 'more' for one"),
        ({**weights, name: torch.ones(7)}, f"weight {name!r} is [7] torch.float32; the program takes"),
    ):
        save_file(changed, package / "model.safetensors")
        sealed(package)
        assert main([str(package)]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("file", ["golden.safetensors", "model.pt2", "model.safetensors"])
def test_a_changed_byte_is_refused(file, package, capsys):
    content = bytearray((package / file).read_bytes())
    content[len(content) // 2] ^= 1
    (package / file).write_bytes(content)
    assert main([str(package)]) == 2
    assert f"file {file!r} was changed" in capsys.readouterr().err
    if file == "golden.safetensors":
        (package / file).write_bytes(b"nothing")
        sealed(package)
        assert main([str(package)]) == 2
        assert "holds no golden results" in capsys.readouterr().err


@pytest.mark.parametrize("written", ["moe"], indirect=True)
def test_a_fresh_process_verifies_and_refuses_without_torch(written, tmp_path):
    command = [sys.executable, "-m", "kpt_serve.package.golden"]
    done = subprocess.run([*command, written], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "right; mean error" in done.stdout
    assert not done.stderr
    document = json.loads((written / "kpt-package.json").read_text())
    document["distributions"] = [{"name": "torch", "versions": "==2.12.*"}]
    shutil.copytree(written, tmp_path / "old")
    (tmp_path / "old" / "kpt-package.json").write_text(json.dumps(document))
    program = (
        "import sys; from kpt_serve.package.golden import main; code = main(sys.argv[1:]);"
        "sys.exit('torch' if 'torch' in sys.modules else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "old"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "was exported by torch 2.12" in done.stderr) == (2, True), done.stderr


def test_an_exact_model_may_round_elsewhere(tmp_path):
    write_program(tmp_path / "toy", nn.Identity(), torch.ones(2, 3), name="toy")
    (error,) = verify(tmp_path / "toy").errors
    assert error.mean == 0
    assert error.mean_allowed == pytest.approx(torch.finfo(torch.float32).eps)


def test_results_that_a_package_lacks_are_told(tmp_path):
    folder = tmp_path / "toy"
    write_program(folder, nn.Linear(3, 3), torch.ones(2, 3), name="toy")
    assert describe_file(folder, "golden.safetensors") in Manifest.read(folder).files
    (folder / "golden.safetensors").unlink()
    sealed(folder)
    with pytest.raises(PackageError, match="holds no golden results"):
        verify(folder)
