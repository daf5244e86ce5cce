import math
import subprocess
import sys

import pytest
import torch

from checkpoint_files import change, config_of, modules, plain_tensors, quantized, write
from kpt_core import InputError, UnknownNameError
from kpt_fp8.checkpoints import convert_checkpoint


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "source", plain_tensors())


def refused(expected, tmp_path, source, **options):
    with pytest.raises((InputError, UnknownNameError), match=expected) as raised:
        convert_checkpoint(source, tmp_path / "out", **({"to": "fp8"} | options))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"to": "gguf"}, "gguf"),
        ({"granularity": "1x128"}, "fp8 can't hold such weights: .*got scales per 1x128"),
        ({"to": "fbgemm_fp8", "granularity": "tensor"}, "fbgemm_fp8 can't hold such weights"),
        ({"activations": "none"}, "activations of fp8"),
        ({"granularity": "tensor", "activations": "tensor"}, "needs a static scale of its activations"),
        ({"to": "modelopt", "granularity": "tensor"}, r"input_scales=calibrate\(model, data\)\), or choose other"),
        ({"dtype": torch.float8_e5m2}, "dtype must be float8_e4m3fn"),
        ({"scale_dtype": torch.float16}, "scale_dtype must be"),
        ({"exclude": "*"}, "no matrix is left"),
        ({"exclude": ["*.o_proj", "*.q_porj"]}, r"exclude has '\*\.q_porj', which describes no module of the files"),
        ({"to": "fbgemm_fp8", "input_scales": {"model.0.q_proj": 1.0}}, "input_scales are for static scales"),
    ],
)
def test_wrong_arguments_are_a_sentence(options, expected, source, tmp_path):
    refused(expected, tmp_path, source, **options)


def test_what_is_8_bit_can_not_be_excluded(source, tmp_path):
    convert_checkpoint(source, tmp_path / "first", to="fp8")
    refused("is quantised already, .*convert the original", tmp_path, tmp_path / "first", exclude="*.o_proj")


def test_targets_that_are_taken_are_refused(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(InputError, match="exists already"):
        convert_checkpoint(source, tmp_path / "out", to="fp8")
    for place in (source, source / "in", tmp_path):
        with pytest.raises(InputError, match="overlaps the source"):
            convert_checkpoint(source, place, to="fp8")
    with pytest.raises(InputError, match="make it first"):
        convert_checkpoint(source, tmp_path / "no" / "out", to="fp8")


def test_weights_that_are_nan_are_refused(source, tmp_path):
    tensors = plain_tensors()
    tensors["model.1.q_proj.weight"][3, 4] = math.nan
    refused("model.1.q_proj.weight must hold numbers that are finite", tmp_path, write(tmp_path / "bad", tensors))


def test_blocks_need_columns_that_fill_them(tmp_path):
    bad = write(tmp_path / "bad", {"model.0.q_proj.weight": torch.randn(128, 200)})
    refused(r"K=200 is no multiple of the block of 128.*exclude it", tmp_path, bad)
    convert_checkpoint(bad, tmp_path / "out", to="compressed-tensors")


def test_matrices_of_gpt2_are_refused(tmp_path):
    bad = write(tmp_path / "bad", plain_tensors(), {"model_type": "gpt2"})
    refused(r"stores? matrices transposed .*has: use the model as it is$", tmp_path, bad)


def test_a_truncated_file_is_refused(source, tmp_path):
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[:-100])
    refused(r"model\.safetensors is truncated, its header needs [\d,]+ bytes and it has", tmp_path, source)


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'; KPT reads 'fp8'"),
        ({"fmt": "e5m2"}, "no device multiplies"),
        ({"fmt": "e3m4"}, "fmt='e3m4'"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
        ({"activation_scheme": "static"}, "has no model.0.o_proj.activation_scale"),
    ],
)
def test_configurations_that_are_not_understood_are_refused(quantization, expected, source, tmp_path):
    quantized(tmp_path / "first", source, "fp8-block")
    refused(expected, tmp_path, change(tmp_path / "first", **quantization), to="compressed-tensors")


def test_groups_of_several_schemes_are_refused(source, tmp_path):
    first = tmp_path / "first"
    quantized(first, source, "ct-channel")
    group = config_of(first)["quantization_config"]["config_groups"]["group_0"]
    other = {**group, "weights": {**group["weights"], "strategy": "tensor"}}
    change(first, config_groups={"group_0": group, "group_1": other})
    refused("must have one scheme; got 2", tmp_path, first)


def test_scales_of_caches_are_not_dropped(source, tmp_path):
    quantized(tmp_path / "first", source, "ct-channel")
    change(tmp_path / "first", kv_cache_scheme={"num_bits": 8})
    refused("kv_cache_scheme", tmp_path, tmp_path / "first", to="fbgemm_fp8")


@pytest.mark.parametrize("key", ["kv_cache_scheme", "kv_cache_quant_algo"])
def test_scales_of_caches_of_modelopt_are_not_dropped(key, source, tmp_path):
    quantized(tmp_path / "first", source, "modelopt")
    change(tmp_path / "first", **{key: "FP8"})
    refused(f"{key}='FP8'", tmp_path, tmp_path / "first", to="compressed-tensors")


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_static_scales_are_positive(scale, source, tmp_path):
    scales = dict.fromkeys(modules(source), scale)
    refused(
        rf"input_scales\['model.0.o_proj'\] must be positive and finite; got {scale}",
        tmp_path,
        source,
        granularity="tensor",
        activations="tensor",
        input_scales=scales,
    )


def test_a_place_that_cant_be_written_is_a_sentence(source):
    with pytest.raises(InputError, match=r"/proc/\.out.*can't be written"):
        convert_checkpoint(source, "/proc/out", to="fp8")


@pytest.mark.parametrize("limit", [10, 60_000])
def test_a_disk_that_is_full_is_a_sentence_and_nothing_is_left(limit, source, tmp_path):
    # As a full disk fails: in the middle of a file.
    script = """
import resource, signal, sys
from kpt_core import InputError
from kpt_fp8.checkpoints import convert_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    convert_checkpoint(sys.argv[1], sys.argv[2], to="fp8")
except InputError as error:
    assert "can't be written" in str(error) and "too large" in str(error), error
else:
    raise AssertionError
"""
    arguments = [sys.executable, "-c", script, source, tmp_path / "out", limit]
    done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["source"]
