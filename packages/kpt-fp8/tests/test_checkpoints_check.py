import errno
import json
from pathlib import Path

import pytest
import torch

from checkpoint_files import VARIANTS, change, config_of, plain_tensors, quantized, tensors_of, write
from kpt_core import InputError
from kpt_fp8.checkpoints import check_checkpoint, convert_checkpoint

NAME = "model.0.q_proj.weight"
ENDS = [("ct-channel", "ignore"), ("modelopt", "ignore")]


@pytest.fixture
def block(tmp_path):
    source = write(tmp_path / "source", plain_tensors())
    quantized(tmp_path / "block", source, "fp8-block")
    return tmp_path / "block"


def only(folder, *parts):
    (found,) = check_checkpoint(folder)
    for part in parts:
        assert part in found
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_written_here_is_sound(variant, tmp_path):
    source = write(tmp_path / "source", plain_tensors())
    quantized(tmp_path / "out", source, variant)
    assert check_checkpoint(tmp_path / "out") == []


def test_reciprocal_scales_are_found(block):
    scale = tensors_of(block)[f"{NAME}_scale_inv"]
    change(block, {f"{NAME}_scale_inv": 1 / scale})
    only(block, f"{NAME}_scale_inv looks like the reciprocal", "store the reciprocal")


@pytest.mark.parametrize("factor", [1e-3, 0.1, 1.0, 10.0])
def test_scales_of_usual_weights_are_not_taken_for_reciprocals(factor, tmp_path):
    tensors = {name: tensor * factor for name, tensor in plain_tensors(torch.float32).items()}
    convert_checkpoint(write(tmp_path / "source", tensors), tmp_path / "out", to="fbgemm_fp8")
    assert check_checkpoint(tmp_path / "out") == []


def test_wrong_names_are_found(block):
    scale = tensors_of(block)[f"{NAME}_scale_inv"]
    change(block, {f"{NAME}_scale": scale}, remove=[f"{NAME}_scale_inv"])
    only(block, f"has its scale as {NAME}_scale", f"fp8 names it {NAME}_scale_inv")


def test_missing_scales_are_found(block):
    change(block, remove=[f"{NAME}_scale_inv"])
    only(block, f"{NAME} is 8-bit and has no scale {NAME}_scale_inv")


def test_wrong_shapes_are_found(block):
    scale = tensors_of(block)[f"{NAME}_scale_inv"]
    change(block, {f"{NAME}_scale_inv": scale.mT.contiguous()})
    only(block, "must be [2, 1]", "got [1, 2]: it is transposed")
    change(block, {f"{NAME}_scale_inv": torch.ones(5, 5)})
    only(block, "it fits no scheme")


def test_mixed_schemes_are_found(block):
    change(block, {f"{NAME}_scale_inv": torch.ones(256, 1)})
    only(block, "that is a scale per row, and a checkpoint has one scheme")


def test_a_weight_that_was_left_out_without_a_word_is_found(block):
    numbers = torch.randn(256, 128)
    change(block, {NAME: numbers}, remove=[f"{NAME}_scale_inv"])
    only(block, f"{NAME} is F32 where others of its kind are 8-bit")
    change(block, modules_to_not_convert=["lm_head", "model.embed_tokens", "model.0.q_proj"])
    assert check_checkpoint(block) == []


def test_a_weight_that_the_configuration_leaves_out_is_found(block):
    change(block, modules_to_not_convert=["lm_head", "model.0.q_proj"])
    only(block, "names model.0.q_proj among those left out")


def test_a_scale_without_codes_is_found(block):
    change(block, {NAME: torch.randn(256, 128)}, modules_to_not_convert=["lm_head", "model.0.q_proj"])
    only(block, f"{NAME}_scale_inv is a scale, and {NAME} is F32, not 8-bit")


def test_nan_is_found(block):
    codes = tensors_of(block)[NAME].view(torch.uint8)
    codes[0, :3] = torch.tensor([0x7F, 0xFF, 0x7E])
    change(block, {NAME: codes.view(torch.float8_e4m3fn)})
    only(block, f"{NAME} holds 2 of {256 * 128} codes that are NaN")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_no_positive_numbers_are_found(value, block):
    change(block, {f"{NAME}_scale_inv": torch.tensor([[value], [1.0]])})
    only(block, f"{NAME} has a scale of {value}; expected positive finite numbers")


def test_codes_of_another_format_are_found(block):
    codes = tensors_of(block)[NAME].view(torch.uint8)
    change(block, {NAME: codes.view(torch.float8_e4m3fnuz)})
    only(block, "float8_e4m3fnuz, and quantization_config says torch.float8_e4m3fn")
    change(block, {NAME: codes.view(torch.float8_e5m2)})
    only(block, "no device multiplies them by activations of e5m2")


def test_a_static_scale_that_is_odd_is_found(tmp_path):
    source = write(tmp_path / "source", plain_tensors())
    quantized(tmp_path / "out", source, "ct-tensor-static")
    change(tmp_path / "out", {"model.0.q_proj.input_scale": torch.tensor([1e5])})
    only(tmp_path / "out", "model.0.q_proj.input_scale is 1e+05, for activations of up to 4.48e+07")


@pytest.mark.parametrize("names", ["lm_head", [3], {"lm_head": 1}])
@pytest.mark.parametrize(("variant", "key"), [("fp8-block", "modules_to_not_convert"), *ENDS])
def test_names_that_are_no_list_are_a_sentence(variant, key, names, tmp_path):
    quantized(tmp_path / "out", write(tmp_path / "source", plain_tensors()), variant)
    change(tmp_path / "out", **{key: names})
    only(tmp_path / "out", f"{key}={names!r}; expected a list of names of modules")


def test_a_pattern_that_is_none_is_a_sentence(block):
    change(block, modules_to_not_convert=["*lm_head"])
    only(block, "no regular expression (nothing to repeat", "write the name itself")


def cut_in_the_data(path):
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_the_header(path):
    path.write_bytes(path.read_bytes()[:100])


def lengthened(path):
    path.write_bytes(path.read_bytes() + b"more")


def zipped(path):
    path.write_bytes(b"PK\x03\x04" + bytes(96))


def emptied(path):
    path.write_bytes(b"")


def without_offsets(path):
    header = json.dumps({"a": {"dtype": "F32"}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def made_a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut_in_the_data, "is truncated, its header needs {size:,} bytes and it has {now:,}"),
        (cut_in_the_header, "is truncated, its header needs at least {header:,} bytes and it has 100"),
        (lengthened, "is too long, its header needs {size:,} bytes and it has {now:,}"),
        (zipped, "is no safetensors file (100 bytes without a valid header)"),
        (emptied, "is no safetensors file (0 bytes without a valid header)"),
        (without_offsets, "is no safetensors file (its header can't be read: "),
        (made_a_folder, "can't be read (Is a directory)"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_file_that_cannot_be_read_is_told_with_its_fault(damage, told, block):
    path = block / "model.safetensors"
    size, header = path.stat().st_size, 8 + int.from_bytes(path.read_bytes()[:8], "little")
    damage(path)
    only(block, f"{path} {told.format(size=size, now=path.stat().st_size, header=header)}", "checkpoint again")


def test_a_file_that_may_not_be_read_is_told_so(block, monkeypatch):
    path, opened = block / "model.safetensors", Path.open

    def denied(self, *arguments, **options):
        if Path(self).suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(self, *arguments, **options)

    # Nothing keeps root from reading a file.
    monkeypatch.setattr("safetensors.safe_open", denied)
    monkeypatch.setattr(Path, "open", denied)
    only(block, f"{path} can't be read (Permission denied): let this user read it")


def test_an_index_that_does_not_fit_is_found(tmp_path):
    source = write(tmp_path / "source", plain_tensors())
    quantized(tmp_path / "out", source, "fp8-block", max_shard_bytes=45_000)
    path = tmp_path / "out" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].pop("model.norm.weight")
    index["weight_map"]["ghost"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    found = check_checkpoint(tmp_path / "out")
    assert len(found) == 2
    assert "has ghost in model-00001-of-00003.safetensors, where it is not" in found[0]
    assert "lacks model.norm.weight" in found[1]
    (tmp_path / "out" / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in check_checkpoint(tmp_path / "out")[0]


def test_an_index_cant_reach_outside_the_folder(tmp_path):
    source = write(tmp_path / "source", plain_tensors(), files=dict.fromkeys(plain_tensors(), "a.safetensors"))
    path = source / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(InputError, match="expected files of the same folder"):
        check_checkpoint(source)


def test_quantised_weights_need_a_configuration(block):
    config = config_of(block)
    del config["quantization_config"]
    (block / "config.json").write_text(json.dumps(config))
    only(block, "has no quantization_config that says how it is scaled")


def test_what_is_no_checkpoint_is_a_sentence(tmp_path):
    with pytest.raises(InputError, match="is no folder"):
        check_checkpoint(tmp_path / "no")
    with pytest.raises(InputError, match=r"config.json can't be read"):
        check_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="is no JSON"):
        check_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"neither model\.safetensors nor"):
        check_checkpoint(tmp_path)
    only(write(tmp_path / "plain", plain_tensors()), "is not quantised")
