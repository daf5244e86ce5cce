"""The commands `kpt validate record`, `kpt validate replay` and `kpt bisect`, from the shell's side."""

import json
import shutil

import pytest
from faulty_kernels import mixtral as tiny_mixtral
from safetensors.torch import load_file, save_file

from kpt_cli.errors import CliError
from kpt_cli.validate.models import Arm
from model_files import listing

MODULE = """
import torch
from torch import nn

def both():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.ones(3, 8)

def model():
    return both()[0]

def number():
    return 3

def mixed():
    model, x = both()
    model[0], model[2] = Cast(8, 8).bfloat16(), Cast(8, 4)
    return model, x

def wide():
    model, x = both()
    return model.double(), x.double()

def narrow():
    return both()[0], torch.ones(3, 7)

def fails():
    return 1 / 0

class Cast(nn.Linear):
    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))
"""


@pytest.fixture
def trace(kpt, mixtral, tmp_path):
    path = tmp_path / "trace.safetensors"
    result = kpt("validate", "record", mixtral, "-o", path, "--tokens", 16, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "64 random" not in result.stdout
    assert "16 random token ids" in result.stdout
    return path


@pytest.fixture
def functions(tmp_path, monkeypatch):
    """A module in the working directory that makes models."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "made_models.py").write_text(MODULE)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))


def test_help_lists_both_commands(kpt):
    assert {"validate", "bisect"} <= set(kpt("--help").stdout.split())
    assert {"record", "replay"} <= set(kpt("validate", "--help").stdout.split())
    assert "--against" in kpt("bisect", "--help").stdout


def test_record_then_replay(kpt, trace):
    result = kpt("validate", "replay", trace, "--use", "eager")
    assert result.exit_code == 0, result.output
    assert "No worse than the recorder at any of 28 places" in result.stdout
    assert "model.layers.0.mlp.experts" not in result.stdout.replace("closest", "")


def test_json_of_a_recording(kpt, mixtral, tmp_path):
    path = tmp_path / "t.safetensors"
    result = kpt(
        "validate", "record", mixtral, "-o", path, "--tokens", 8, "--dtype", "bfloat16", "--backward", "--json"
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["trace"] == str(path)
    assert document["about"]["dtype"] == "bfloat16"
    assert (document["layers"], document["gradients"]) == (28, 21)
    assert document["bytes"] == path.stat().st_size


def test_moved_and_changed_models(kpt, mixtral, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(mixtral, here)
    path = tmp_path / "trace.safetensors"
    assert kpt("validate", "record", here, "-o", path, "--tokens", 8).exit_code == 0
    here.rename(there)
    gone = kpt("validate", "replay", path)
    assert gone.exit_code == 2
    assert "which is not on this machine; say where it is with --model" in gone.stderr
    assert kpt("validate", "replay", path, "--model", there).exit_code == 0
    weights = load_file(there / "model.safetensors")
    weights["model.norm.weight"][3] *= 1.001
    save_file(weights, there / "model.safetensors", {"format": "pt"})
    changed = kpt("validate", "replay", path, "--model", there)
    assert changed.exit_code == 2
    assert "1 of 22 tensors" in changed.stderr or "model.norm.weight" in changed.stderr


def test_bisect(kpt, mixtral, trace, faulty):
    sound = kpt("bisect", mixtral, "--use", "eager", "--against", "reference", "--tokens", 8)
    assert sound.exit_code == 0, sound.output
    assert "No module differs: 28 calls by eager are no worse than by reference." in sound.stdout
    assert kpt("bisect", mixtral, "--trace", trace, "--use", "eager").exit_code == 0


def test_bisect_names_the_culprit(kpt, mixtral, tmp_path, faulty):
    from faulty_kernels import MARK

    model = shutil.copytree(mixtral, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if name.startswith("model.layers.1.") and ".experts.0.w1" in name)
    weights[name][0, 0] = MARK
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    path = tmp_path / "trace.safetensors"
    assert kpt("validate", "record", model, "-o", path, "--tokens", 8, "--use", "reference").exit_code == 0
    replayed = kpt("validate", "replay", path, "--use", "moe.experts=faulty_kernels:coarse")
    assert replayed.exit_code == 1, replayed.output
    table = replayed.stdout.split("\nThe first module that is worse")[0]
    assert "model.layers.1.mlp.experts   mean" in table
    assert max(map(len, table.splitlines())) <= 100
    assert "look at model.layers.1.mlp.experts first: mean error" in replayed.stdout
    found = json.loads(kpt("validate", "replay", path, "--use", "moe.experts=faulty_kernels:coarse", "--json").stdout)
    assert found["ok"] is False
    worse = next(layer for layer in found["layers"] if layer["key"] == "model.layers.1.mlp.experts")
    assert not worse["ok"]
    assert worse["run"]["mean"] > worse["bound"]["mean"]
    assert kpt("bisect", model, "--trace", path, "--use", "moe.experts=faulty_kernels:coarse").exit_code == 1
    arguments = ("bisect", model, "--use", "moe.experts=faulty_kernels:coarse", "--tokens", 8)
    result = kpt(*arguments)
    assert result.exit_code == 1, result.output
    for said in (
        "model.layers.1.mlp.experts",
        "MixtralExperts",
        "float32 [8, 32]",
        "moe.experts: faulty_kernels:coarse",
        "moe.experts: reference",
        "is allowed",
    ):
        assert said in " ".join(result.stdout.split()), said
    document = json.loads(kpt(*arguments, "--json").stdout)
    assert [culprit["key"] for culprit in document["culprits"]] == ["model.layers.1.mlp.experts"]


def test_a_model_that_a_function_makes(kpt, functions, tmp_path):
    path = tmp_path / "trace.safetensors"
    result = kpt("validate", "record", "made_models:both", "-o", path)
    assert result.exit_code == 0, result.output
    assert kpt("validate", "replay", path, "--model", "made_models:model").exit_code == 0
    unnamed = kpt("validate", "replay", path)
    assert unnamed.exit_code == 2
    assert (
        "was recorded from made_models:both, whose code runs only if you name it; say where it is with --model"
        in unnamed.stderr
    )
    assert kpt("bisect", "made_models:both", "--use", "kpt").exit_code == 0


@pytest.mark.parametrize(("source", "dtype"), [("mixed", "auto"), ("wide", "auto"), ("mixed", "bfloat16")])
def test_a_model_is_loaded_again_as_it_was_recorded(kpt, functions, tmp_path, source, dtype):
    path, model = tmp_path / "trace.safetensors", f"made_models:{source}"
    for command in (
        ("validate", "record", model, "-o", path, "--dtype", dtype),
        ("validate", "replay", path, "--model", model),
        ("bisect", model, "--trace", path),
    ):
        result = kpt(*command)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("made_models:model", "returned a model and no inputs"),
        ("made_models:number", "returned a int; expected a torch.nn.Module"),
        ("made_models:narrow", "Sequential does not run on the inputs (recording): RuntimeError: mat1 and mat2"),
        ("made_models:fails", "made_models:fails fails: ZeroDivisionError: division by zero; `kpt --debug` shows"),
        ("made_models:nix", "module made_models has no function nix"),
        ("made_modles:both", "there is no module made_modles here"),
        ("made models:both", "neither a folder nor of the form package.module:function"),
        ("nowhere", "nowhere does not exist"),
    ],
)
def test_models_that_are_none(kpt, functions, tmp_path, source, said):
    result = kpt("validate", "record", source, "-o", tmp_path / "trace.safetensors")
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "trace.safetensors" not in listing(tmp_path)


def test_wrong_arguments(kpt, mixtral, trace, tmp_path):
    for arguments, said in (
        (("validate", "record", mixtral, "-o", trace), "exists; choose another name, or replace it with --force"),
        (("validate", "record", mixtral, "-o", tmp_path / "none" / "t"), "does not exist; make it first"),
        (("validate", "record", mixtral, "-o", tmp_path / "t", "--dtype", "bf16"), "did you mean bfloat16"),
        (
            ("validate", "record", mixtral, "-o", tmp_path / "t", "--use", "nvidai"),
            "unknown backend or kernel 'nvidai'",
        ),
        (("validate", "record", mixtral, "-o", tmp_path / "t", "--layers", "nix"), "no module has such a path"),
        (("validate", "replay", tmp_path / "none"), "is no file; expected a trace"),
        (("validate", "replay", mixtral / "model.safetensors"), "is a safetensors file and no trace"),
        (("bisect", mixtral, "--trace", trace, "--against", "eager"), "leave --against and --dtype out"),
    ):
        result = kpt(*arguments)
        assert result.exit_code == 2, result.output
        assert said in " ".join(result.stderr.split())
        assert result.stdout == ""
    assert listing(tmp_path) == ["trace.safetensors"]


@pytest.mark.parametrize(
    ("text", "experts", "choices"),
    [
        (None, "kpt", ()),
        ("eager", "eager", ()),
        ("reference", "kpt", (("*", "reference"),)),
        ("moe.experts=a.b:c, kpt , nvidia", "kpt", (("*", "nvidia"), ("moe.experts", "a.b:c"))),
    ],
)
def test_arms(text, experts, choices):
    arm = Arm.parse(text)
    assert (arm.experts, arm.choices) == (experts, choices)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("moe.experts=", "'moe.experts=' is not of the form NAME or OP=NAME"),
        (",", "'' is not of the form NAME or OP=NAME"),
        ("eager,kpt", "several implementations of experts"),
        ("eager,nvidia", "several implementations of experts"),
    ],
)
def test_arms_that_are_none(text, said):
    with pytest.raises(CliError, match=said):
        Arm.parse(text)


def test_a_model_is_as_it_was_even_after_an_error():
    model, inside = tiny_mixtral(), []
    before = model.config._experts_implementation

    def fail():
        with Arm.parse("eager").running(model):
            inside.append(model.config._experts_implementation)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (inside, model.config._experts_implementation) == (["eager"], before)
