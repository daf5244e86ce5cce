import json

import pytest
import torch

from checkpoint_files import (
    LAYERS,
    VARIANTS,
    change,
    config_of,
    modules,
    plain_tensors,
    quantized,
    tensors_of,
    write,
)
from kpt_core import InputError
from kpt_fp8 import compute_fp8_scale, quantize_to_fp8
from kpt_fp8.checkpoints import convert_checkpoint
from kpt_fp8.checkpoints.contents import describe
from kpt_fp8.checkpoints.folder import CheckpointFolder

WEIGHTS = [f"{name}.weight" for name in LAYERS]


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "source", plain_tensors())


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def numbers(folder):
    """What the quantised weights of a checkpoint stand for, by its own reading."""
    contents = describe(CheckpointFolder(folder))
    contents.require_good()
    with contents.folder.reading() as reader:
        return {
            name: each.read(reader, contents.scheme).dequantize().clone() for name, each in contents.weights.items()
        }


SUFFIXES = {"fp8": "_scale_inv", "torchao": None}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_checkpoint_is_quantised_as_the_op_does_it(variant, source, tmp_path):
    report = quantized(tmp_path / "out", source, variant)
    before, after, options = tensors_of(source), tensors_of(tmp_path / "out"), VARIANTS[variant]
    granularity = {"fp8-block": "128x128", "ct-block": "128x128"}.get(variant, options.get("granularity", "row"))
    assert [each.name for each in report.tensors] == sorted(WEIGHTS)
    assert not report.exact
    assert all(each.sqnr > 31 for each in report.tensors)
    for name in WEIGHTS:
        module = name.removesuffix(".weight")
        codes, scale = {
            "fp8": (name, f"{name}_scale_inv"),
            "torchao": (f"{module}._weight_qdata", f"{module}._weight_scale"),
        }.get(options["to"], (name, f"{name}_scale"))
        given = None
        if variant == "ct-channel-bf16":
            given = after[scale].float().flatten()
            assert after[scale].dtype is torch.bfloat16
            assert (given >= compute_fp8_scale(before[name], granularity="row")).all()
        expected = quantize_to_fp8(before[name], granularity=granularity, scale=given)
        assert torch.equal(bits(after[codes]), bits(expected.codes))
        assert torch.equal(after[scale].float().flatten(), expected.scale.flatten())
        del after[codes], after[scale]
        if "static" in variant:
            given = after.pop(f"{module}.{'activation_scale' if options['to'] == 'fp8' else 'input_scale'}")
            assert given.item() == pytest.approx(0.01 * (modules(source).index(module) + 1))
    assert set(after) == set(before) - set(WEIGHTS)
    for name, tensor in after.items():
        assert torch.equal(bits(tensor), bits(before[name]))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o044 == 0o044


def test_folders_inside_a_checkpoint_are_copied(source, tmp_path):
    there = {"1_Pooling/config.json": True, "2_Dense/pytorch_model.bin": True, "code/helper.py": True}
    there |= {"additional_chat_templates/tool_use.jinja": True}
    there |= {"other/weights.bin": False, ".cache/notes.json": False}
    for name in (*there, "../apart/weights.bin"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    paths = ("", "1_Pooling", "2_Dense", "../apart")
    (source / "modules.json").write_text(json.dumps([{"path": path} for path in paths]))
    out = tmp_path / "out"
    quantized(out, source, "fp8-block")
    assert {name: (out / name).exists() for name in there} == there
    assert (out / "1_Pooling" / "config.json").read_text() == "1_Pooling/config.json"
    assert (tmp_path / "apart" / "weights.bin").exists()
    assert {file.name for file in out.iterdir() if file.is_dir()} == {
        name.split("/")[0] for name in there if there[name]
    }


SHAPES = {
    "fp8-block": [2, 1],
    "fp8-tensor-static": [],
    "ct-channel": [256, 1],
    "ct-tensor-static": [1],
    "ct-block": [2, 1],
    "fbgemm": [256, 1],
    "modelopt": [256],
    "torchao": [256, 1],
}


@pytest.mark.parametrize("variant", SHAPES)
def test_scales_have_the_shape_that_readers_expect(variant, source, tmp_path):
    quantized(tmp_path / "out", source, variant)
    (scale,) = (
        each
        for name, each in tensors_of(tmp_path / "out").items()
        if "model.0.q_proj" in name and "weight_scale" in name
    )
    assert list(scale.shape) == SHAPES[variant]


def test_blocks_of_modelopt_have_four_dimensions(source, tmp_path):
    convert_checkpoint(source, tmp_path / "out", to="modelopt", granularity="128x128")
    assert list(tensors_of(tmp_path / "out")["model.0.q_proj.weight_scale"].shape) == [2, 1, 1, 1]
    assert config_of(tmp_path / "out")["quantization_config"]["quant_algo"] == "FP8_PB_WO"


def test_the_configuration_says_what_was_done(source, tmp_path):
    quantized(tmp_path / "out", source, "fp8-block")
    config = config_of(tmp_path / "out")
    assert config["model_type"] == "llama"
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
        "ignored_layers": ["lm_head", "model.embed_tokens"],
    }


#: Pairs that keep every number: the same granularity, or one scale repeated.
EXACT = [
    (variant, target)
    for variant in VARIANTS
    for target in ("fp8", "compressed-tensors", "fbgemm_fp8", "modelopt", "torchao")
    if ("tensor" in variant)
    or ("block" in variant and target in ("fp8", "compressed-tensors", "modelopt"))
    or (not any(each in variant for each in ("tensor", "block")) and target != "fp8")
]


@pytest.mark.parametrize(("variant", "target"), EXACT)
def test_conversions_that_keep_every_number(variant, target, source, tmp_path):
    quantized(tmp_path / "first", source, variant)
    report = convert_checkpoint(tmp_path / "first", tmp_path / "second", to=target)
    assert report.exact
    assert all(each.sqnr is None for each in report.tensors)
    before, after = numbers(tmp_path / "first"), numbers(tmp_path / "second")
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name])
    if "static" in variant and target in ("fp8", "compressed-tensors", "modelopt"):
        assert not report.notes
        scales = [
            {
                name: each.item()
                for name, each in tensors_of(tmp_path / one).items()
                if "input_s" in name or "ion_s" in name
            }
            for one in ("first", "second")
        ]
        assert list(scales[0].values()) == list(scales[1].values())
        assert len(scales[0]) == 3


def test_there_and_back_gives_the_same_bytes(source, tmp_path):
    quantized(tmp_path / "a", source, "ct-block")
    convert_checkpoint(tmp_path / "a", tmp_path / "b", to="fp8")
    convert_checkpoint(tmp_path / "b", tmp_path / "c", to="compressed-tensors")
    first, last = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "c")
    assert first.keys() == last.keys()
    assert all(torch.equal(bits(first[name]), bits(last[name])) for name in first)
    assert config_of(tmp_path / "a") == config_of(tmp_path / "c")


def test_what_cant_be_exact_is_an_error_unless_it_is_asked_for(source, tmp_path):
    quantized(tmp_path / "first", source, "fp8-block")
    with pytest.raises(InputError, match=r"model.0.o_proj.weight can't be written with the same.*requantize=True"):
        convert_checkpoint(tmp_path / "first", tmp_path / "second", to="fbgemm_fp8")
    assert not (tmp_path / "second").exists()
    report = convert_checkpoint(tmp_path / "first", tmp_path / "second", to="fbgemm_fp8", requantize=True)
    assert not report.exact
    assert all(28 < each.sqnr < 50 for each in report.tensors)
    assert "quantised anew per row, signal to noise" in str(report)
    assert "The bound of activations was None and is 1200.0 now." in report.notes


def test_what_readers_do_to_activations_is_told(source, tmp_path):
    quantized(tmp_path / "first", source, "ct-tensor-static")
    report = convert_checkpoint(tmp_path / "first", tmp_path / "second", to="torchao")
    assert report.exact
    assert "whose scales are left out" in report.notes[0]


# fnuz


def every_code(dtype):
    codes = torch.arange(256, dtype=torch.uint8).repeat(64).view(128, 128).view(dtype)
    keep = codes.float().isfinite()
    return torch.where(keep, codes.view(torch.uint8), 0).view(dtype)


def fp8_checkpoint(folder, codes, scale, fmt="e4m3"):
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": fmt, "weight_block_size": [128, 128]}
    tensors = {"model.0.q_proj.weight": codes, "model.0.q_proj.weight_scale_inv": scale}
    return write(folder, tensors, {"quantization_config": config})


def test_codes_become_fnuz_and_back_to_the_bit(tmp_path):
    first = fp8_checkpoint(tmp_path / "first", every_code(torch.float8_e4m3fn), torch.tensor([[0.37]]))
    report = convert_checkpoint(first, tmp_path / "second", to="fp8", dtype=torch.float8_e4m3fnuz)
    assert report.exact
    after = tensors_of(tmp_path / "second")
    assert after["model.0.q_proj.weight"].dtype is torch.float8_e4m3fnuz
    assert config_of(tmp_path / "second")["quantization_config"]["fmt"] == "e4m3fnuz"
    assert torch.equal(*(numbers(tmp_path / each)["model.0.q_proj.weight"] for each in ("first", "second")))
    again = convert_checkpoint(tmp_path / "second", tmp_path / "third", to="fp8", dtype=torch.float8_e4m3fn)
    assert again.exact
    assert torch.equal(*(numbers(tmp_path / each)["model.0.q_proj.weight"] for each in ("first", "third")))


def test_minus_zeros_that_fnuz_has_not_are_told(tmp_path):
    tensors = plain_tensors()
    tensors["model.0.q_proj.weight"][0, :2] = -0.0
    folder = write(tmp_path / "source", tensors)
    convert_checkpoint(folder, tmp_path / "fn", to="fp8")
    report = convert_checkpoint(tmp_path / "fn", tmp_path / "fnuz", to="fp8", dtype=torch.float8_e4m3fnuz)
    told = {each.name: each.how for each in report.tensors}
    codes = tensors_of(tmp_path / "fn")["model.0.q_proj.weight"].view(torch.uint8)
    count = int((codes == 0x80).sum())
    assert count >= 2
    assert f"{count} minus zeros as zeros, " in told["model.0.q_proj.weight"]


@pytest.mark.parametrize(("rows", "granularity"), [(576, None), (640, None), (64, None), (576, "tensor")])
def test_rows_that_end_within_a_block_are_noted(rows, granularity, tmp_path):
    folder = write(tmp_path / "source", {"a.q_proj.weight": torch.randn(rows, 128)})
    report = convert_checkpoint(folder, tmp_path / "out", to="fp8", granularity=granularity)
    noted = [each for each in report.notes if each.startswith("a.q_proj.weight: ") and "would load that wrong" in each]
    assert bool(noted) is (rows == 576 and granularity is None)


def test_the_largest_code_of_fnuz_has_no_equal(tmp_path):
    codes = every_code(torch.float8_e4m3fnuz)
    first = fp8_checkpoint(tmp_path / "first", codes, torch.tensor([[0.5]]), fmt="e4m3fnuz")
    with pytest.raises(InputError, match="largest code of float8_e4m3fnuz"):
        convert_checkpoint(first, tmp_path / "second", to="fp8", dtype=torch.float8_e4m3fn)
    report = convert_checkpoint(first, tmp_path / "second", to="fp8", dtype=torch.float8_e4m3fn, requantize=True)
    assert not report.exact
    assert report.tensors[0].sqnr > 25


# Files


def test_shards_are_of_bounded_size_and_the_index_is_right(source, tmp_path):
    report = quantized(tmp_path / "out", source, "fp8-block", max_shard_bytes=45_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) == 3
    assert files[0] == "model-00001-of-00003.safetensors"
    assert sorted(each.name for each in (tmp_path / "out").glob("*.safetensors")) == files
    assert all((tmp_path / "out" / each).stat().st_size < 48_000 for each in files)
    assert index["metadata"]["total_size"] == report.bytes
    assert set(index["weight_map"]) == set(tensors_of(tmp_path / "out"))
    assert not describe(CheckpointFolder(tmp_path / "out")).faults


def test_scales_may_stand_in_another_file_than_codes(source, tmp_path):
    quantized(tmp_path / "one", source, "fp8-block")
    tensors, config = tensors_of(tmp_path / "one"), config_of(tmp_path / "one")
    files = {name: f"model-{1 + ('scale' in name)}.safetensors" for name in tensors}
    write(tmp_path / "two", tensors, config, files)
    report = convert_checkpoint(tmp_path / "two", tmp_path / "out", to="compressed-tensors")
    assert report.exact
    expected = numbers(tmp_path / "one")
    assert all(torch.equal(each, expected[name]) for name, each in numbers(tmp_path / "out").items())


def test_nothing_is_left_of_a_conversion_that_stops(source, tmp_path):
    def stop(done, total, name):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, tmp_path / "out", to="fp8", max_shard_bytes=1000, progress=stop)
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


# What stays as it is


def test_a_tied_output_layer_is_named_among_those_left_out(tmp_path):
    tensors = plain_tensors()
    del tensors["lm_head.weight"]
    convert_checkpoint(write(tmp_path / "source", tensors), tmp_path / "first", to="fp8")
    assert config_of(tmp_path / "first")["quantization_config"]["ignored_layers"] == ["model.embed_tokens", "lm_head"]
    change(tmp_path / "first", modules_to_not_convert=["model.embed_tokens"], ignored_layers=[])
    convert_checkpoint(tmp_path / "first", tmp_path / "second", to="compressed-tensors")
    assert config_of(tmp_path / "second")["quantization_config"]["ignore"] == ["model.embed_tokens", "lm_head"]
    other = write(tmp_path / "untied", tensors, {"tie_word_embeddings": False})
    convert_checkpoint(other, tmp_path / "third", to="compressed-tensors")
    assert config_of(tmp_path / "third")["quantization_config"]["ignore"] == ["model.embed_tokens"]


def test_what_is_excluded_is_added_to_what_is_always_left(source, tmp_path):
    report = convert_checkpoint(source, tmp_path / "out", to="fp8", exclude="*.o_proj")
    assert [each.name for each in report.tensors] == ["model.0.q_proj.weight", "model.1.q_proj.weight"]
    left = {"lm_head", "model.0.o_proj", "model.embed_tokens"}
    assert set(config_of(tmp_path / "out")["quantization_config"]["ignored_layers"]) == left


def test_excluding_a_module_leaves_all_in_it(source, tmp_path):
    report = convert_checkpoint(source, tmp_path / "out", to="fp8", exclude="model.0")
    assert [each.name for each in report.tensors] == ["model.1.q_proj.weight"]
    # What is always left may be named, whether or not the files have it.
    convert_checkpoint(source, tmp_path / "again", to="fp8", exclude=("lm_head", "score", "*.norm"))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "router",
    ["mlp.gate", "mlp.gate.wg", "mlp.router.layer", "mlp.pick", "mlp.pick.inner", "shared_head.head"],
)
def test_routers_stay_as_they_are_whatever_they_are_called(router, stacked, tmp_path):
    single = {f"mlp.experts.{number}.up_proj.weight": (64, 128) for number in range(4)}
    # A shared expert may have as many rows as there are experts.
    shared = {f"mlp.shared_expert.{name}.weight": (4, 128) for name in ("gate_proj", "up_proj")}
    shapes = {f"{router}.weight": (4, 128), **shared, **({"mlp.experts.up_proj": (4, 64, 128)} if stacked else single)}
    tensors = {f"model.0.{name}": torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    convert_checkpoint(write(tmp_path / "source", tensors), tmp_path / "out", to="fp8")
    left = {name for name, each in tensors_of(tmp_path / "out").items() if each.dtype is torch.bfloat16}
    assert left == {f"model.0.{router}.weight", *(["model.0.mlp.experts.up_proj"] if stacked else [])}


@pytest.mark.parametrize(
    ("up", "down", "owners"),
    [
        ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", ["mlp.experts"]),
        ("moe.input_linear.weight", "moe.output_linear.weight", ["moe.input_linear", "moe.output_linear"]),  # Granite's
    ],
)
def test_stacked_experts_stay_as_they_are_and_it_is_said(up, down, owners, tmp_path):
    tensors = plain_tensors() | {"model.0.conv.weight": torch.randn(8, 4, 3)}
    tensors |= {f"model.0.{up}": torch.randn(4, 64, 128), f"model.0.{down}": torch.randn(4, 128, 32)}
    report = convert_checkpoint(
        write(tmp_path / "source", tensors, {"num_local_experts": 4}), tmp_path / "out", to="fp8"
    )
    named = [f"model.0.{owner}" for owner in owners]
    (note,) = report.notes
    assert note.startswith(f"Experts stacked in one tensor stay as they are: {', '.join(named)}: ")
    ignored = config_of(tmp_path / "out")["quantization_config"]["ignored_layers"]
    assert {*named} <= {*ignored}
    assert len(ignored) == len({*ignored})
