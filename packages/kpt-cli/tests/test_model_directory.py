"""Folders that are no whole model: each is refused with the offending thing, what was expected and the next step."""

import json
import shutil

import pytest

from kpt_cli.errors import CliError
from kpt_cli.optimize.command import copy_model
from kpt_cli.optimize.model_directory import check_safetensors, read_model_directory
from model_files import listing, save_mixtral


@pytest.fixture
def model(mixtral, tmp_path):
    """A whole model that a test may spoil."""
    return shutil.copytree(mixtral, tmp_path / "mixtral")


@pytest.fixture(scope="session")
def sharded_once(tmp_path_factory):
    return save_mixtral(tmp_path_factory.mktemp("models") / "sharded", max_shard_size="100KB")


@pytest.fixture
def sharded(sharded_once, tmp_path):
    return shutil.copytree(sharded_once, tmp_path / "sharded")


def test_whole_model(model):
    found = read_model_directory(model)
    assert found.architecture == "MixtralForCausalLM"
    assert found.weights == (model / "model.safetensors",)
    assert found.weight_bytes == (model / "model.safetensors").stat().st_size


def test_whole_sharded_model(sharded):
    found = read_model_directory(sharded)
    assert len(found.weights) > 2
    assert found.weights == tuple(sorted(sharded.glob("*.safetensors")))


def test_model_behind_symbolic_links(sharded, tmp_path):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for file in sharded.iterdir():
        (folder / file.name).symlink_to(file)
    assert read_model_directory(folder).weight_bytes == read_model_directory(sharded).weight_bytes


def missing_directory(model):
    shutil.rmtree(model)


def file_instead(model):
    shutil.rmtree(model)
    model.write_text("no folder")


def no_config(model):
    (model / "config.json").unlink()


def config_in_a_folder_below(model):
    (model / "inner").mkdir()
    (model / "config.json").rename(model / "inner" / "config.json")


def empty_config(model):
    (model / "config.json").write_text("")


def config_is_not_json(model):
    (model / "config.json").write_text('{"model_type": "mixtral",\n "hidden_size": }')


def config_is_binary(model):
    (model / "config.json").write_bytes(b"\xff\xfe\x00\x80")


def config_is_a_list(model):
    (model / "config.json").write_text("[1, 2]")


def config_without_model_type(model):
    (model / "config.json").write_text('{"hidden_size": 32}')


def no_weights(model):
    (model / "model.safetensors").unlink()


def only_a_pickle(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def weights_of_another_name(model):
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")


def truncated_data(model):
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[: len(data) // 2])


def truncated_header(model):
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:100])


def empty_weights(model):
    (model / "model.safetensors").write_bytes(b"")


def too_long(model):
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"more")


def weights_are_noise(model):
    (model / "model.safetensors").write_bytes(b"\x10" + bytes(7) + b"no json, really!")


def header_is_a_list(model):
    (model / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]")


def lfs_pointer(model):
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


SPOILT = {
    missing_directory: "does not exist",
    file_instead: "is a file; expected the folder of a Hugging Face model",
    no_config: "has no config.json",
    config_in_a_folder_below: "did you mean {model}/inner?",
    empty_config: "config.json is empty",
    config_is_not_json: "config.json is not valid JSON (line 2, column 17",
    config_is_binary: "config.json is not text",
    config_is_a_list: "config.json holds a list; expected a JSON object",
    config_without_model_type: "names no model_type",
    no_weights: "has a config.json but no weights; expected model.safetensors",
    only_a_pickle: "only as a pickle (pytorch_model.bin)",
    weights_of_another_name: "has model-00001-of-00002.safetensors but neither model.safetensors nor",
    truncated_data: "model.safetensors is truncated: its header needs",
    truncated_header: "model.safetensors is truncated: its header alone needs",
    empty_weights: "is not a safetensors file (0 bytes",
    too_long: "model.safetensors is too long",
    weights_are_noise: "is not a safetensors file: its header can't be read",
    header_is_a_list: "is not a safetensors file: its header can't be read",
    lfs_pointer: "is a Git LFS pointer, not the weights; run `git lfs pull`",
}


@pytest.mark.parametrize(("spoil", "said"), SPOILT.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_spoilt_model_is_refused_by_the_command_and_nothing_is_written(kpt, model, tmp_path, spoil, said):
    spoil(model)
    before = listing(tmp_path)
    result = kpt("optimize", model, "-o", tmp_path / "plan.json", "--copy", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith("kpt: error: ")
    assert said.format(model=model) in result.stderr
    assert str(model) in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert listing(tmp_path) == before


def test_pickle_gets_advice(model):
    only_a_pickle(model)
    with pytest.raises(CliError, match=r"can run code when it is loaded.*convert it to safetensors"):
        read_model_directory(model)


def test_misspelt_directory_offers_what_lies_beside_it(model):
    with pytest.raises(CliError, match=f"beside it lies {model}"):
        read_model_directory(model.parent / "mixtrall")


class TestSharded:
    def test_missing_shard(self, sharded):
        name = "model-00002-of-"
        next(sharded.glob(f"{name}*")).unlink()
        with pytest.raises(CliError, match=rf"names \d+ files, and .* lacks {name}\d+.safetensors: .* not complete"):
            read_model_directory(sharded)

    def test_many_missing_shards_are_counted(self, sharded):
        count = len([file.unlink() for file in sharded.glob("*.safetensors")])
        with pytest.raises(CliError, match=f"and {count - 3} more: the download"):
            read_model_directory(sharded)

    def test_truncated_shard(self, sharded):
        file = sorted(sharded.glob("*.safetensors"))[-1]
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(CliError, match=f"{file.name} is truncated"):
            read_model_directory(sharded)

    def test_tensor_is_not_where_the_index_says(self, sharded):
        self.change_index(sharded, lambda weight_map: weight_map.update({"made.up": sorted(weight_map.values())[0]}))
        with pytest.raises(CliError, match=r"lacks made\.up, which model\.safetensors\.index\.json says it holds"):
            read_model_directory(sharded)

    @pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "a/b.safetensors"])
    def test_index_that_leaves_the_folder(self, sharded, name):
        self.change_index(sharded, lambda weight_map: weight_map.update({"made.up": name}))
        with pytest.raises(CliError, match="expected plain file names in the same folder"):
            read_model_directory(sharded)

    @pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
    def test_index_without_a_map(self, sharded, text):
        (sharded / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CliError, match="has no weight_map"):
            read_model_directory(sharded)

    @staticmethod
    def change_index(folder, change):
        file = folder / "model.safetensors.index.json"
        document = json.loads(file.read_text())
        change(document["weight_map"])
        file.write_text(json.dumps(document))


def test_header_is_read_as_the_library_reads_it(model):
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        assert check_safetensors(model / "model.safetensors") == set(file.keys())


def test_folders_inside_a_model_are_copied(model, tmp_path):
    there = {"1_Pooling/config.json": True, "2_Dense/pytorch_model.bin": True}
    there |= {"other/weights.bin": False, ".cache/notes.json": False}
    for name in there:
        (model / name).parent.mkdir()
        (model / name).write_text(name)
    (model / "modules.json").write_text(
        '[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "../../.."}]'
    )
    out = tmp_path / "out"
    out.mkdir()
    copy_model(read_model_directory(model), out, "auto")
    assert {name: (out / name).exists() for name in there} == there
    assert (out / "2_Dense" / "pytorch_model.bin").read_text() == "2_Dense/pytorch_model.bin"
