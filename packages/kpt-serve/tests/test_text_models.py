import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kpt_serve.errors import PackageError
from kpt_serve.package import Manifest
from kpt_serve.package.golden import main, verify
from kpt_serve.package.writing import finish, write_transformers

pytestmark = pytest.mark.filterwarnings("ignore")  # of what transformers imports


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    from transformers import MixtralConfig, MixtralForCausalLM

    folder = tmp_path_factory.mktemp("models") / "mixtral"
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=128,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    (folder / "extra").mkdir()
    (folder / "extra" / "notes.txt").write_text("kept")
    return folder


@pytest.fixture(scope="module")
def written(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages") / "mixtral"
    plan = folder.parent / "plan.json"
    plan.write_text("{}")
    write_transformers(folder, source, name="mixtral", plan=plan)
    return folder


def test_the_folder_is_the_package_byte_for_byte(source, written):
    manifest = Manifest.read(written)
    own = {"golden.safetensors", "kpt_plan.json"}
    theirs = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert {file.path for file in manifest.files} - own == theirs - {".gitattributes"}
    for name in theirs - {".gitattributes"}:
        assert (source / name).read_bytes() == (written / name).read_bytes()
    assert (source / "model.safetensors").samefile(written / "model.safetensors")
    assert [op.name for op in manifest.ops] == ["attention.dense", "moe.experts"]
    assert {each.name for each in manifest.distributions} == {"kpt-core", "torch", "transformers"}
    assert manifest.inputs[0].dynamic[1].max == 128
    assert (manifest.outputs[0].datatype, manifest.outputs[0].shape) == ("FP32", (-1, -1, 256))


def test_kpt_serves_what_is_verified(written):
    report = verify(written)
    assert report.passed
    assert report.reference == "float64"
    assert report.sizes == ("input_ids 1x16", "input_ids 2x8")
    served = {kernel.partition(" by ")[0]: calls for kernel, calls in report.kernels.items()}
    assert served == {"attention.dense": 4, "moe.experts": 4}


def test_eight_bit_weights_are_run_by_kpt_fp8(source, tmp_path):
    from kpt_fp8.checkpoints import convert_checkpoint

    convert_checkpoint(source, tmp_path / "eight", to="fp8", granularity="tensor")
    manifest = write_transformers(tmp_path / "toy", tmp_path / "eight", name="toy")
    assert {"fp8.linear", "moe.experts"} <= {op.name for op in manifest.ops}
    assert "float8_e4m3fn" in manifest.dtypes
    assert verify(tmp_path / "toy").passed


def test_a_wrong_weight_with_right_checksums_is_found(source, tmp_path):
    manifest = write_transformers(tmp_path / "toy", source, name="toy")
    path = tmp_path / "toy" / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = weights["lm_head.weight"] * 1.001
    path.unlink()  # it is the source's as well
    save_file(weights, path, {"format": "pt"})
    finish(tmp_path / "toy", manifest)
    assert main([str(tmp_path / "toy")]) == 1


def test_what_is_no_model_is_told_and_leaves_nothing(source, tmp_path):
    with pytest.raises(PackageError, match=r"is no model; expected a folder with config\.json"):
        write_transformers(tmp_path / "toy", tmp_path, name="toy")
    with pytest.raises(PackageError, match="is source and target"):
        write_transformers(source, source, name="toy", overwrite=True)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"model_type": "no such", "architectures": ["No"]}))
    save_file({"x": torch.ones(1)}, broken / "model.safetensors")
    with pytest.raises(PackageError, match="can't be loaded by transformers: "):
        write_transformers(tmp_path / "toy", broken, name="toy")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
