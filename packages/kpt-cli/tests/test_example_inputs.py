import json
import shutil

import pytest
import torch

from kpt_cli.errors import CliError
from kpt_cli.optimize.model import example_inputs
from kpt_cli.optimize.model_directory import read_model_directory

CPU = torch.device("cpu")


@pytest.fixture
def config(mixtral):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(mixtral)


@pytest.fixture
def with_tokenizer(mixtral, tmp_path):
    """A model whose tokenizer gives one id for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = shutil.copytree(mixtral, tmp_path / "mixtral")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytes_only).save_pretrained(model)
    return model


def test_random_ids_are_seeded_and_in_the_vocabulary(mixtral, config):
    directory = read_model_directory(mixtral)
    first, again, other = (example_inputs(directory, config, 100, CPU, seed) for seed in (0, 0, 1))
    ids = first.kwargs["input_ids"]
    assert ids.shape == (1, 100)
    assert 0 <= ids.min() <= ids.max() < 256
    assert torch.equal(ids, again.kwargs["input_ids"])
    assert not torch.equal(ids, other.kwargs["input_ids"])
    assert first.said == "100 random token ids (the folder has no tokenizer)"


def test_real_text_where_there_is_a_tokenizer(with_tokenizer, config):
    from transformers import AutoTokenizer

    directory = read_model_directory(with_tokenizer)
    found = example_inputs(directory, config, 120, CPU, 3)
    assert found.said == "120 tokens of Python's documentation"
    text = AutoTokenizer.from_pretrained(with_tokenizer).decode(found.kwargs["input_ids"][0])
    assert len(text) == 120
    assert "*****" in text  # the underlined title of a topic
    assert not torch.equal(
        found.kwargs["input_ids"], example_inputs(directory, config, 120, CPU, 4).kwargs["input_ids"]
    )


def test_broken_tokenizer_is_told(with_tokenizer, config):
    (with_tokenizer / "tokenizer.json").write_text("{")
    found = example_inputs(read_model_directory(with_tokenizer), config, 8, CPU, 0)
    assert "8 random token ids (its tokenizer could not be used: " in found.said


def test_tokenizer_of_another_model_is_told(with_tokenizer, config):
    config.vocab_size = 40
    found = example_inputs(read_model_directory(with_tokenizer), config, 100, CPU, 0)
    assert "and the model knows 40" in found.said
    assert found.kwargs["input_ids"].max() < 40


def test_more_tokens_than_the_model_reads(mixtral, config):
    with pytest.raises(CliError, match=r"--tokens 129: .* reads at most 128 tokens at a time; ask for fewer"):
        example_inputs(read_model_directory(mixtral), config, 129, CPU, 0)


def test_default_length_is_what_the_model_reads(mixtral, config):
    directory = read_model_directory(mixtral)
    assert example_inputs(directory, config, None, CPU, 0).kwargs["input_ids"].shape == (1, 128)
    config.max_position_embeddings = 4096
    assert example_inputs(directory, config, None, CPU, 0).kwargs["input_ids"].shape == (1, 512)


def test_encoder_and_decoder_are_both_fed(mixtral, config):
    config.is_encoder_decoder = True
    found = example_inputs(read_model_directory(mixtral), config, 8, CPU, 0)
    assert set(found.kwargs) == {"input_ids", "decoder_input_ids"}


def test_tokenizer_with_own_code_is_not_run(with_tokenizer, config):
    file = with_tokenizer / "tokenizer_config.json"
    document = json.loads(file.read_text()) | {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    document["tokenizer_class"] = "Evil"
    file.write_text(json.dumps(document))
    (with_tokenizer / "evil.py").write_text("raise SystemExit('the code of the model was run')")
    example_inputs(read_model_directory(with_tokenizer), config, 8, CPU, 0)
