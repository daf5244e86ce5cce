"""A trace's file: whole or not at all, and refused with a sentence if it is not what was recorded."""

import hashlib
import json
import pickle
from dataclasses import replace

import pytest
import torch
from faulty_kernels import inputs, mixtral
from safetensors import safe_open
from safetensors.torch import save_file

from kpt_cli.errors import CliError
from kpt_cli.validate.gradients import FOLDED, fold, signs
from kpt_cli.validate.recording import record
from kpt_cli.validate.replaying import replay
from kpt_cli.validate.trace import Trace

SIGNS = [1, -1, 1, -1, -1, -1, 1, 1, -1, -1, 1, 1, -1, 1, -1, -1]


@pytest.fixture(scope="module")
def trace():
    return record(mixtral(), inputs(), gradients=True, name="a model", said="some tokens")


@pytest.fixture
def file(trace, tmp_path):
    path = tmp_path / "trace.safetensors"
    trace.save(path)
    return path


def content(path):
    with safe_open(path, framework="pt") as stream:
        return {name: stream.get_tensor(name) for name in stream.keys()}, stream.metadata()  # noqa: SIM118


def rewrite(path, change):
    """Change the tensors, the metadata or the description of a trace."""
    tensors, metadata = content(path)
    about = json.loads(metadata["kpt.about"])
    change(tensors, metadata, about)
    if metadata["kpt.about"] != "broken":
        metadata["kpt.about"] = json.dumps(about)
    if not metadata.pop("old digest", ""):
        metadata["kpt.about_sha256"] = hashlib.sha256(metadata["kpt.about"].encode()).hexdigest()
    save_file(tensors, path, metadata)


def test_what_is_saved_is_what_is_loaded(trace, file):
    loaded = Trace.load(file)
    assert loaded.about == trace.about
    assert loaded.kwargs["use_cache"] is False
    assert torch.equal(loaded.kwargs["input_ids"], trace.kwargs["input_ids"])
    for mine, theirs in zip((*loaded.layers, *loaded.gradients), (*trace.layers, *trace.gradients), strict=True):
        assert (mine.key, mine.type, mine.kernels, mine.lengths, mine.upto) == (
            (theirs.key, theirs.type, theirs.kernels, theirs.lengths, theirs.upto)
        )
        for one, other in zip(mine.outputs + mine.reference, theirs.outputs + theirs.reference, strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)
    assert replay(mixtral(), loaded).ok


def test_what_is_known_of_the_recorder(trace):
    about = trace.about
    assert (about.model, about.model_class, about.dtype, about.arm) == (
        "a model",
        "MixtralForCausalLM",
        "float32",
        "kpt",
    )
    assert about.device.startswith("cpu")
    assert about.versions.keys() >= {"torch", "transformers", "kpt-core", "kpt-moe", "kpt-cli", "python"}
    assert about.config["hidden_size"] == 32


def test_a_tensor_that_one_module_gives_and_the_next_takes_is_kept_once(file):
    _, metadata = content(file)
    about = json.loads(metadata["kpt.about"])
    layers = {layer["key"]: layer for layer in about["layers"]}
    assert layers["model.norm"]["outputs"] == layers["lm_head"]["inputs"]
    sides = ("inputs", "outputs", "reference", "alone", "handed")
    named = [name for layer in about["layers"] for side in sides for name in layer[side]]
    assert len(set(named)) < 0.8 * len(named)


def test_a_failure_to_write_leaves_nothing_behind(trace, tmp_path, monkeypatch):
    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        trace.save(tmp_path / "trace.safetensors")
    assert list(tmp_path.iterdir()) == []


def break_inputs(tensors, metadata, about):
    name = dict(about["inputs"][1]["items"])["input_ids"]["tensor"]
    tensors[name][0, 0] += 1


def break_output(tensors, metadata, about):
    tensors[about["layers"][3]["outputs"][0]][0, 0, 0] += 1e-3


def break_format(tensors, metadata, about):
    metadata["kpt.trace"] = "99"


def break_description(tensors, metadata, about):
    metadata["kpt.about"] = "broken"


def drop_a_key(tensors, metadata, about):
    del about["layers"][0]["upto"]


def name_no_dtype(tensors, metadata, about):
    about["about"]["dtype"] = "load"


def say_nothing_in_words(tensors, metadata, about):
    about["about"]["model"] = 3


def load_in_another_way(tensors, metadata, about):
    about["about"]["load_dtype"] = "trust me"


def record_nothing(tensors, metadata, about):
    about["layers"] = []


def record_no_output(tensors, metadata, about):
    about["layers"][0]["outputs"] = []


def sum_backwards(tensors, metadata, about):
    about["layers"][0]["upto"] = [-1, 1]


def sum_for_ever(tensors, metadata, about):
    about["layers"][0]["lengths"] = [float("inf")]


def keep_the_digest(tensors, metadata, about):
    about["layers"][0]["key"] = "other"
    metadata["old digest"] = "yes"


def name_a_missing_tensor(tensors, metadata, about):
    about["layers"][0]["outputs"] = ["nix"]


def drop_the_mark(tensors, metadata, about):
    del metadata["kpt.trace"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (break_inputs, "1 of .* tensors in .* are not those that were recorded"),
        (break_output, "1 of .* tensors in .* are not those that were recorded"),
        (break_format, "is a trace of format 99, and this version reads format 1"),
        (break_description, "its description is not JSON"),
        (drop_a_key, "its description is not one .KeyError: 'upto'"),
        (name_a_missing_tensor, "its description is not one .KeyError: 'nix'"),
        (name_no_dtype, "its description is not one .ValueError: dtype 'load'"),
        (say_nothing_in_words, "its description is not one .TypeError"),
        (load_in_another_way, "its description is not one .ValueError: dtype 'trust me'"),
        (record_nothing, "its description is not one .ValueError: nothing was recorded"),
        (record_no_output, "its description is not one .ValueError: nothing was recorded"),
        (sum_backwards, "its description is not one .ValueError: a length"),
        (sum_for_ever, "its description is not one .OverflowError"),
        (keep_the_digest, "the description in .* is not what was recorded"),
        (drop_the_mark, "is a safetensors file and no trace"),
    ],
)
def test_changed_files(file, change, said):
    rewrite(file, change)
    with pytest.raises(CliError, match=said):
        Trace.load(file)


def test_a_description_that_is_nested_too_deeply(file):
    tensors, metadata = content(file)
    metadata["kpt.about"] = "[" * 100_000 + "]" * 100_000
    metadata["kpt.about_sha256"] = hashlib.sha256(metadata["kpt.about"].encode()).hexdigest()
    save_file(tensors, file, metadata)
    with pytest.raises(CliError, match="its description is not JSON"):
        Trace.load(file)


def test_inputs_are_named_by_their_hash(file):
    tensors, metadata = content(file)
    name = dict(json.loads(metadata["kpt.about"])["inputs"][1]["items"])["input_ids"]["tensor"]
    ids = tensors[name]
    assert name == hashlib.sha256(b"torch.int64 [1, 24];" + ids.numpy().tobytes()).hexdigest()


def test_inputs_that_share_memory(trace, tmp_path):
    both = torch.arange(6.0)
    replace(trace, args=(both[:4], both[2:])).save(tmp_path / "trace.safetensors")
    first, second = Trace.load(tmp_path / "trace.safetensors").args
    assert torch.equal(first, both[:4])
    assert torch.equal(second, both[2:])


@pytest.mark.parametrize("size", [0, 7, 100, 20_000, -1])
def test_truncated_files(file, size):
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CliError, match=r"truncated|not a safetensors file"):
        Trace.load(file)


def test_files_of_another_kind(tmp_path):
    missing = tmp_path / "none"
    with pytest.raises(CliError, match="is no file; expected a trace"):
        Trace.load(missing)
    pickled = tmp_path / "pickle"
    pickled.write_bytes(pickle.dumps({"weights": 1}))
    with pytest.raises(CliError, match="not a safetensors file"):
        Trace.load(pickled)


def test_inputs_that_no_file_can_hold(trace, tmp_path):
    with pytest.raises(CliError, match="an input of the model is a object"):
        replace(trace, kwargs={"x": object()}).save(tmp_path / "trace.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_nested_inputs(trace, tmp_path):
    tensor = torch.arange(3.0)
    given = {"pair": (tensor, {"tensor": 2, "items": None}), "flag": True}
    replace(trace, args=(tensor,), kwargs=given).save(tmp_path / "trace.safetensors")
    loaded = Trace.load(tmp_path / "trace.safetensors")
    assert torch.equal(loaded.args[0], tensor)
    assert loaded.kwargs["pair"][1] == {"tensor": 2, "items": None}
    assert loaded.kwargs["flag"] is True


class TestFolding:
    def test_signs_are_the_same_for_ever(self):
        # Another machine, or a later version, must fold with the same ones.
        assert signs(16).tolist() == SIGNS
        assert abs(signs(FOLDED).sum().item()) < 4 * FOLDED**0.5
        assert not torch.equal(signs(FOLDED, 1), signs(FOLDED, 2))

    def test_small_gradients_are_kept(self):
        gradient = torch.randn(8, 8)
        assert torch.equal(fold(gradient), gradient)

    @pytest.mark.parametrize("place", [0, FOLDED, 3 * FOLDED + 5])
    def test_any_wrong_element_changes_one_sum_by_as_much(self, place):
        gradient = torch.randn(3 * FOLDED + 10, dtype=torch.float64)
        wrong = gradient.clone()
        wrong[place] += 1
        difference = (fold(wrong) - fold(gradient)).abs()
        assert difference.sum().item() == pytest.approx(1)
        wrong[place] = float("nan")
        assert fold(wrong).isnan().sum() == 1
