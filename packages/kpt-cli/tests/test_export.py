import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from kpt_serve.package import Distribution, Manifest, Tolerance
from kpt_serve.package.writing import finish

MODULE = """
import torch
from kpt_moe.layers import MoEConfig, MoELayer

def build():
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(hidden_size=32, num_experts=4))
    return layer, torch.randn(3, 5, 32), {"x": {0: (1, 64), 1: (1, 512)}}

def alone():
    return build()[0]

def failing():
    raise RuntimeError("no such table")
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "exported_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("exported_here", None)


def test_a_model_is_exported_and_verified_in_a_process_of_its_own(kpt, tmp_path, monkeypatch):
    (tmp_path / "plan.json").write_text("{}")
    done = kpt("export", "exported_here:build", "-o", "toy", "--plan", "plan.json")
    assert done.exit_code == 0, done.stderr
    assert "ops of KPT: moe.experts, moe.top_k_gating." in done.stdout
    manifest = Manifest.read("toy")
    assert manifest.name == "toy"
    assert {file.path for file in manifest.files} == {
        *("README.md", "golden.safetensors", "kpt_plan.json", "model.pt2", "model.safetensors", "sbom.cdx.json")
    }
    assert "exists already" in kpt("export", "exported_here:build", "-o", "toy").stderr

    # The process that verifies finds the CPU's backend, where that is installed, and this one does not.
    monkeypatch.setenv("KPT_DISABLE", "cpu")
    done = kpt("export", "--verify", "toy", "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert len(report["sizes"]) == 3

    weights = load_file("toy/model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, "toy/model.safetensors")
    finish(tmp_path / "toy", manifest)
    done = kpt("export", "--verify", "toy")
    assert done.exit_code == 1, done.stderr
    assert "output: WRONG; mean error" in done.stdout
    (tmp_path / "toy" / "more").touch()
    done = kpt("export", "--verify", "toy")
    assert (done.exit_code, "file 'more' was added" in done.stderr) == (2, True)


def test_a_signature_is_verified_before_the_model(kpt, tmp_path):
    for line in (
        "openssl ecparam -name prime256v1 -genkey -noout -out key.pem",
        "openssl ec -in key.pem -pubout -out key.pub.pem",
    ):
        subprocess.run(line.split(), check=True, capture_output=True)
    assert kpt("export", "exported_here:build", "-o", "toy", "--sign", "key.pem").exit_code == 0
    assert kpt("export", "--verify", "toy", "--key", "key.pub.pem").exit_code == 0
    content = (tmp_path / "toy" / "README.md").read_bytes()
    (tmp_path / "toy" / "README.md").write_bytes(content + b"!")
    finish(tmp_path / "toy", Manifest.read("toy"))  # all sums are right again
    assert kpt("export", "--verify", "toy").exit_code == 0
    done = kpt("export", "--verify", "toy", "--key", "key.pub.pem")
    assert (done.exit_code, "README.md" in done.stderr or "kpt-package.json" in done.stderr) == (2, True), done.stderr
    assert "is for --verify" in kpt("export", "exported_here:build", "-o", "two", "--key", "key.pub.pem").stderr


def test_a_hugging_face_folder_is_exported(kpt, mixtral):
    done = kpt("export", mixtral, "-o", "toy", "--name", "mixtral", "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["name"], document["kind"]) == ("mixtral", "transformers")
    assert "moe.experts" in {op["name"] for op in document["ops"]}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["exported_here:build"], "takes SPEC and -o FOLDER, or --verify FOLDER"),
        (["exported_here:build", "--verify", "toy"], "--verify takes a package alone"),
        (["exported_here:alone", "-o", "toy"], "returned a MoELayer; expected a model and its inputs"),
        (["exported_here:failing", "-o", "toy"], "exported_here:failing fails: RuntimeError: no such table"),
        (["exported_here:other", "-o", "toy"], "module exported_here has no function other"),
        (["no_such_module:build", "-o", "toy"], "there is no module no_such_module here"),
        (["exported_here:build", "-o", "toy", "--name", "a/b"], "'name' is 'a/b'; expected a plain name"),
        (["exported_here:build", "-o", "toy", "--plan", "none"], "--plan none is no file"),
        (["--verify", "toy"], "kpt-package.json can't be read: No such file"),
        (["--verify", "toy", "--manifests", "out"], "--verify and --manifests take a package each"),
        (["toy", "--manifests", "out"], "--manifests FOLDER takes a package, and --image REGISTRY/NAME:TAG"),
        (["--manifests", "out", "--image", "toy:1"], "--manifests FOLDER takes a package, and --image"),
        (["toy", "--manifests", "out", "--image", "toy:1", "--overwrite"], "--overwrite is not for --manifests"),
        (["toy", "--manifests", "out", "--image", "toy:1", "--sign", "key.pem"], "--sign is not for --manifests"),
        (["toy", "--manifests", "out", "--image", "toy:1"], "kpt-package.json can't be read: No such file"),
        (["exported_here:build", "-o", "toy", "--image", "toy:1"], "--image, --base and --openai are for --manifests"),
    ],
)
def test_wrong_input_is_a_sentence_and_leaves_nothing(arguments, told, kpt, tmp_path):
    done = kpt("export", *arguments)
    assert done.exit_code == 2
    assert told in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["exported_here.py"]


def test_what_runs_a_package_is_written(kpt, tmp_path):
    (tmp_path / "toy").mkdir()
    Manifest(
        name="toy",
        kind="program",
        inputs=(),
        outputs=(),
        ops=(),
        device_types=("cpu", "cuda"),
        dtypes=("float32",),
        distributions=(Distribution("torch", "==2.13.*"),),
        tolerance=Tolerance(2.0, 4.0),
        files=(),
    ).write("toy")
    options = ("--image", "REGISTRY/toy:1", "--base", "python:3.12-slim", "--name", "scorer", "--device-type", "cpu")
    done = kpt("export", "--manifests", "deploy", "toy", *options)
    assert done.exit_code == 0, done.stderr
    assert "docker build -f deploy/Containerfile -t REGISTRY/toy:1 toy\n" in done.stdout
    assert "\nFROM python:3.12-slim\n" in (tmp_path / "deploy" / "Containerfile").read_text()
    deployment = (tmp_path / "deploy" / "deployment.yaml").read_text()
    assert 'name: "scorer"' in deployment
    assert 'image: "REGISTRY/toy:1"' in deployment
    assert "nvidia.com/gpu" not in deployment

    assert "exists already" in kpt("export", "--manifests", "deploy", "toy", *options).stderr
    done = kpt("export", "--manifests", "other", "toy", "--image", "toy:1", "--json")
    assert sorted(json.loads(done.stdout)["files"]) == sorted(path.name for path in (tmp_path / "deploy").iterdir())
    assert "nvidia.com/gpu" in (tmp_path / "other" / "deployment.yaml").read_text()


def test_without_kpt_serve_it_is_said_what_to_install(kpt, monkeypatch):
    monkeypatch.setattr("kpt_cli.export.find_spec", lambda name: None)
    done = kpt("export", "exported_here:build", "-o", "toy")
    assert (done.exit_code, "packages/kpt-cli[serve]" in done.stderr) == (2, True)
