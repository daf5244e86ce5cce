"""`kpt convert` and `kpt doctor CHECKPOINT`: what they write, say and refuse."""

import json

import pytest
from safetensors.torch import load_file, save_file

from kpt_cli import convert

checkpoints = pytest.importorskip("kpt_fp8.checkpoints", reason="the commands need kpt-fp8")
NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def quantised(tmp_path_factory, llama):
    """Llama in compressed-tensors, a scale for each row."""
    folder = tmp_path_factory.mktemp("fp8") / "rows"
    checkpoints.convert_checkpoint(llama, folder, to="compressed-tensors", granularity="row")
    return folder


@pytest.fixture
def damaged(quantised, tmp_path):
    """A copy, whose tensors a test changes."""
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "config.json").write_bytes((quantised / "config.json").read_bytes())

    def write(**changes):
        tensors = load_file(quantised / "model.safetensors")
        tensors |= {name: change(tensors[name]) for name, change in changes.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return write


def test_the_names_of_formats_and_dtypes_are_those_of_the_package():
    assert tuple(checkpoints.FORMATS) == convert.FORMATS
    assert tuple(checkpoints.PLAIN) == convert.PLAIN


def test_quantised_for_the_first_time_says_what_each_weight_lost(kpt, llama, tmp_path):
    result = kpt("convert", llama, tmp_path / "out", "--to", "compressed-tensors", "--exclude", "*.o_proj")
    assert result.exit_code == 0, result.output
    assert "unquantised -> compressed-tensors: float8_e4m3fn, scales per row" in result.stdout
    assert "Quantised 6 weights, signal to noise " in result.stdout  # embeddings and the output layer stay, too
    (line,) = (line for line in result.stdout.splitlines() if line.startswith(NAME))
    assert float(line.split()[-2]) == pytest.approx(31.5, abs=2)  # dB, of three bits of mantissa
    assert checkpoints.check_checkpoint(tmp_path / "out") == []


def test_modelopt_needs_no_scales_of_activations_that_the_shell_can_not_give(kpt, llama, tmp_path):
    result = kpt("convert", llama, tmp_path / "out", "--to", "modelopt")
    assert result.exit_code == 0, result.output
    assert "unquantised -> modelopt: float8_e4m3fn, scales per row; activations: dynamic" in result.stdout
    refused = kpt("convert", llama, tmp_path / "static", "--to", "modelopt", "--granularity", "tensor")
    assert refused.exit_code == 2
    assert "in Python call convert_checkpoint(..., input_scales=calibrate(model, data))" in refused.stderr
    assert "--granularity row" in refused.stderr


def test_the_same_numbers_in_another_format(kpt, quantised, tmp_path):
    result = kpt("convert", quantised, tmp_path / "out", "--to", "fbgemm_fp8", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["exact"]
    assert {each["sqnr"] for each in document["tensors"]} == {None}
    assert NAME in {each["name"] for each in document["tensors"]}
    said = kpt("convert", quantised, tmp_path / "again", "--to", "torchao").stdout
    assert "Kept 7 weights bit-exact; " in said
    assert "bit-exact: 7 weights, codes and scales as they were" in said
    fnuz = kpt("convert", quantised, tmp_path / "fnuz", "--to", "fbgemm_fp8", "--dtype", "float8_e4m3fnuz").stdout
    assert "codes of torch.float8_e4m3fnuz with scales times 2" in fnuz


def test_numbers_that_the_format_can_not_hold_are_quantised_anew_where_asked(kpt, quantised, tmp_path):
    command = ("convert", quantised, tmp_path / "out", "--to", "fp8", "--granularity", "tensor")
    refused = kpt(*command)
    assert refused.exit_code == 2
    assert "can't be written with the same numbers" in refused.stderr
    assert "--requantize" in refused.stderr
    assert list(tmp_path.iterdir()) == []
    result = kpt(*command, "--requantize")
    assert result.exit_code == 0, result.output
    assert "Quantised 7 weights, signal to noise " in result.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--to", "modelop"), "did you mean modelopt?"),
        (("--to", "fp8", "--dtype", "float8_e5m2"), "known: float8_e4m3fn, float8_e4m3fnuz"),
        (("--to", "fbgemm_fp8", "--granularity", "tensor"), "it has scales per row; got scales per tensor"),
        (("--to", "fp8", "--granularity", "row"), "it has scales per 128x128 or tensor; got scales per row"),
    ],
)
def test_wrong_options_are_one_sentence(kpt, llama, tmp_path, options, said):
    result = kpt("convert", llama, tmp_path / "out", *options)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr


@pytest.mark.parametrize("command", [("convert", "in", "out", "--to", "fp8"), ("doctor", "in")], ids=" ".join)
def test_without_the_package_they_say_what_to_install(kpt, monkeypatch, command):
    monkeypatch.setattr("kpt_cli.convert.find_spec", lambda name: None)
    result = kpt(*command)
    assert result.exit_code == 2
    assert "pip install ./packages/kpt-fp8" in result.stderr


def test_doctor_of_sound_checkpoints(kpt, llama, quantised):
    result = kpt("doctor", quantised)
    assert result.exit_code == 0, result.output
    assert f"{quantised} is compressed-tensors: float8_e4m3fn, scales per row" in result.stdout
    assert "7 weights are 8-bit" in result.stdout
    assert result.stdout.endswith(f"No fault in {quantised}.\n")
    plain = kpt("doctor", llama)
    assert plain.exit_code == 0
    assert f"{llama} is no FP8 checkpoint" in plain.stdout
    document = json.loads(kpt("doctor", llama, "--json").stdout)
    assert (document["ok"], document["format"], document["weights"]) == (True, None, 0)


def test_doctor_of_a_damaged_checkpoint(kpt, damaged):
    folder = damaged(**{f"{NAME}_scale": lambda scale: -scale})
    result = kpt("doctor", folder)
    assert result.exit_code == 1
    assert f"{NAME} has a scale of -" in result.stdout
    assert "quantise the weight again" in result.stdout
    assert result.stdout.endswith(f"1 fault in {folder}.\n")
    (fault,) = json.loads(kpt("doctor", folder, "--json").stdout)["faults"]
    assert fault in result.stdout
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    cut = kpt("doctor", folder)
    assert cut.exit_code == 1
    assert "truncated" in cut.stdout


def test_doctor_of_what_is_no_checkpoint(kpt, tmp_path):
    wrong = ((tmp_path / "none", "is no folder"), (tmp_path, "config.json can't be read"))
    for folder, said in (*wrong, ("Qwen/Qwen3-FP8", "hf download Qwen/Qwen3-FP8 --local-dir DIR")):
        result = kpt("doctor", folder)
        assert result.exit_code == 2
        assert said in result.stderr
    both = kpt("doctor", tmp_path, "--lock", "kpt.lock")
    assert both.exit_code == 2
    assert "give one of them" in both.stderr
