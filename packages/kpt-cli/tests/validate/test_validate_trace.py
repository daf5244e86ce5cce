"""A trace's file: whole or not at all, and refused with a sentence if it is not what was recorded."""

import hashlib
import pickle
from dataclasses import replace

import pytest
import torch
from faulty_kernels import inputs, mixtral
from safetensors import safe_open
from safetensors.torch import save_file

from kpt_cli.errors import CliError
from kpt_cli.validate.observing import signs
from kpt_cli.validate.replaying import FOLDED, fold, record, replay
from kpt_cli.validate.trace import Trace

SIGNS = [1, -1, 1, -1, -1, -1, 1, 1, -1, -1, 1, 1, -1, 1, -1, -1]


@pytest.fixture(scope="module")
def trace():
    return record(mixtral(), inputs(), gradients=True, about={"model": "a model"})


@pytest.fixture
def file(trace, tmp_path):
    path = tmp_path / "trace.safetensors"
    trace.save(path)
    return path


def content(path):
    with safe_open(path, framework="pt") as stream:
        return {name: stream.get_tensor(name) for name in stream.keys()}, stream.metadata()  # noqa: SIM118


def test_what_is_saved_is_what_is_loaded(trace, file):
    loaded = Trace.load(file)
    assert loaded.about == trace.about
    assert loaded.kwargs["use_cache"] is False
    assert torch.equal(loaded.kwargs["input_ids"], trace.kwargs["input_ids"])
    for mine, theirs in zip((*loaded.layers, *loaded.gradients), (*trace.layers, *trace.gradients), strict=True):
        assert (mine.key, mine.type, mine.kernels, mine.lengths, mine.rounding) == (
            (theirs.key, theirs.type, theirs.kernels, theirs.lengths, theirs.rounding)
        )
        for one, other in zip(mine.outputs + mine.reference, theirs.outputs + theirs.reference, strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)
    assert replay(mixtral(), loaded).ok


def test_what_is_known_of_the_recorder(trace):
    about = trace.about
    assert (about["model"], about["model_class"], about["dtype"], about["arm"]) == (
        ("a model", "MixtralForCausalLM", "float32", "kpt")
    )
    assert about["device"].startswith("cpu")
    assert about["versions"].keys() >= {"torch", "transformers", "kpt-core", "kpt-moe", "kpt-cli", "python"}
    assert about["config"]["hidden_size"] == 32


def test_equal_tensors_are_written_once_and_named_by_their_hash(trace, file):
    tensors, _ = content(file)
    layers = {layer.key: layer for layer in trace.layers}
    assert torch.equal(layers["model.norm"].outputs[0], layers["lm_head"].inputs[0])
    sides = ("inputs", "outputs", "reference", "alone", "handed")
    named = sum(len(getattr(call, side)) for call in (*trace.layers, *trace.gradients) for side in sides)
    assert len(tensors) < 0.8 * named
    ids = trace.kwargs["input_ids"]
    assert hashlib.sha256(b"torch.int64 [1, 24];" + ids.numpy().tobytes()).hexdigest() in tensors


def test_a_failure_to_write_leaves_nothing_behind(trace, tmp_path, monkeypatch):
    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        trace.save(tmp_path / "trace.safetensors")
    with pytest.raises(CliError, match="an input of the model is a object"):
        replace(trace, kwargs={"x": object()}).save(tmp_path / "trace.safetensors")
    assert list(tmp_path.iterdir()) == []


def break_a_tensor(tensors, metadata):
    next(x for x in tensors.values() if x.is_floating_point() and x.numel()).view(-1)[0] += 1e-3


def change_the_description(tensors, metadata):
    metadata["kpt.content"] = metadata["kpt.content"].replace("Mixtral", "Mistral")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (break_a_tensor, "1 of .* tensors in .* is not what was recorded"),
        (change_the_description, "the description in .* is not what was recorded"),
        (lambda tensors, metadata: metadata.update({"kpt.trace": "99"}), "is a trace of format 99; this version reads"),
        (lambda tensors, metadata: metadata.pop("kpt.trace"), "is a safetensors file and no trace"),
    ],
)
def test_changed_files(file, change, said):
    tensors, metadata = content(file)
    change(tensors, metadata)
    save_file(tensors, file, metadata)
    with pytest.raises(CliError, match=said):
        Trace.load(file)


@pytest.mark.parametrize("size", [0, 7, 100, 20_000, -1])
def test_truncated_files(file, size):
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CliError, match=r"truncated|not a safetensors file"):
        Trace.load(file)


def test_files_of_another_kind(tmp_path):
    with pytest.raises(CliError, match="is no file; expected a trace"):
        Trace.load(tmp_path / "none")
    pickled = tmp_path / "pickle"
    pickled.write_bytes(pickle.dumps({"weights": 1}))
    with pytest.raises(CliError, match="not a safetensors file"):
        Trace.load(pickled)


def test_nested_inputs_and_some_that_share_memory(tmp_path):
    class Summing(torch.nn.Linear):
        def forward(self, first, second, pair, flag):
            return super().forward(first + second)

    both = torch.arange(6.0)
    given = {"first": both[:4], "second": both[2:], "pair": (both, {"tensor": 2, "items": None}), "flag": True}
    record(Summing(4, 4), given).save(tmp_path / "trace.safetensors")
    loaded = Trace.load(tmp_path / "trace.safetensors").kwargs
    assert torch.equal(loaded["first"], both[:4])
    assert torch.equal(loaded["second"], both[2:])
    assert loaded["pair"][1] == {"tensor": 2, "items": None}
    assert loaded["flag"] is True


def test_signs_are_the_same_for_ever():
    # Another machine, or a later version, must fold with the same ones.
    assert signs(16).tolist() == SIGNS
    assert abs(signs(FOLDED).sum().item()) < 4 * FOLDED**0.5
    assert not torch.equal(signs(FOLDED, 1), signs(FOLDED, 2))


@pytest.mark.parametrize("place", [0, FOLDED, 3 * FOLDED + 5])
def test_any_wrong_element_of_a_folded_gradient_changes_one_sum_by_as_much(place):
    gradient = torch.randn(3 * FOLDED + 10, dtype=torch.float64)
    assert torch.equal(fold(gradient[:64]), gradient[:64])
    wrong = gradient.clone()
    wrong[place] += 1
    assert (fold(wrong) - fold(gradient)).abs().sum().item() == pytest.approx(1)
    wrong[place] = float("nan")
    assert fold(wrong).isnan().sum() == 1
