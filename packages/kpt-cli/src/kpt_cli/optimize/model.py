"""A checked model folder as a model, loaded by transformers without running code of the model's, and its inputs."""

import difflib
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kpt_cli.console import some
from kpt_cli.errors import CliError, sentence

from .model_directory import CONFIG, ModelDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
DEFAULT_TOKENS = 512
#: One of these says that the folder has a tokenizer.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def quiet_transformers() -> None:
    """Turn off progress bars and hints of the library: what matters is said by the command."""
    import logging as standard

    from transformers.utils import logging

    # transformers imports torchao where it is there, which tells of libraries for GPUs that it could not load.
    for name in ("torchao", "torch.utils._pytree"):
        standard.getLogger(name).setLevel(standard.ERROR)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def load_model(directory: ModelDirectory, dtype: str, device: torch.device) -> "PreTrainedModel":
    """Load the model that the config names, in evaluation mode, with weights in a dtype, or `auto` for the config's."""
    config, cls = config_and_class(directory)
    options: dict[str, Any] = {} if hasattr(cls, "_from_config") else {"trust_remote_code": False}
    options |= {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    try:
        model, info = cls.from_pretrained(directory.path, config=config, dtype=dtype, **options)
    except Exception as error:  # transformers raises whatever its many loaders raise
        raise as_sentence(error, f"{directory.path} could not be loaded as {cls.__name__}") from error
    if missing := sorted(map(str, info.get("missing_keys", ()))):
        raise CliError(
            f"the weights in {directory.path} lack {len(missing)} of the model's tensors ({some(missing)}), which "
            f"would be random; expected the weights that belong to its {CONFIG}; fetch both again"
        )
    if model.main_input_name != "input_ids":
        raise CliError(
            f"{directory.path} is a {type(model).__name__}, which reads {model.main_input_name}; expected a language "
            "model, which reads token ids"
        )
    return model.eval().to(device)  # type: ignore[no-any-return]


def config_and_class(directory: ModelDirectory) -> "tuple[PreTrainedConfig, Any]":
    """Return the config, and the class that it names if transformers has it, else that of causal language models."""
    import transformers

    quiet_transformers()
    cls: Any = getattr(transformers, directory.architecture or "", None)
    named = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    return _load_config(directory), cls if named else transformers.AutoModelForCausalLM


def _load_config(directory: ModelDirectory) -> "PreTrainedConfig":
    from transformers import AutoConfig, __version__
    from transformers.models.auto import configuration_auto

    known: Mapping[str, str] = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]
    model_type = directory.config["model_type"]
    if model_type not in known:
        if "auto_map" in directory.config:
            raise CliError(
                f"{directory.path} brings its own Python code for model type {model_type!r}, which is never run; "
                f"expected an architecture of transformers {__version__}"
            )
        near = difflib.get_close_matches(model_type, known, n=3, cutoff=0.6)
        offer = f"did you mean {' or '.join(near)}?" if near else "a newer transformers may know it"
        raise CliError(
            f"{directory.path / CONFIG} names the model type {model_type!r}, which transformers {__version__} does not "
            f"know; {offer}"
        )
    try:
        return AutoConfig.from_pretrained(directory.path, **LOCAL)  # type: ignore[no-any-return]
    except Exception as error:
        raise as_sentence(error, f"{directory.path / CONFIG} is not a valid {model_type} config") from error


def as_sentence(error: Exception, what: str) -> Exception:
    """Return what a library raised as an error of one sentence."""
    if not isinstance(error, OSError | ValueError) and sentence(error) is not None:
        return error  # out of memory and the like speak for themselves
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return CliError(f"{what}: {' '.join(lines)[:400]}")


class ExampleInputs(NamedTuple):
    """Keyword arguments of the model's forward, and what they are, in words."""

    kwargs: dict[str, Tensor]
    said: str


def example_inputs(
    directory: ModelDirectory, config: Any, tokens: int | None, device: torch.device, seed: int
) -> ExampleInputs:
    """Make one sequence of `tokens`, or of 512 if the model reads so many; a real text if there is a tokenizer."""
    text_config = config.get_text_config()
    longest = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        longest = None
    if tokens is None:
        tokens = min(DEFAULT_TOKENS, longest or DEFAULT_TOKENS)
    elif longest is not None and tokens > longest:
        raise CliError(f"--tokens {tokens}: {directory.path} reads at most {longest} tokens at a time; ask for fewer")
    vocabulary = int(text_config.vocab_size)
    try:
        ids, said = _of_text(directory, tokens, vocabulary, seed), f"{tokens} tokens of Python's documentation"
    except _NoText as why:
        ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(seed))
        said = f"{tokens} random token ids ({why})"
    inputs = {"input_ids": ids.to(device)}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return ExampleInputs(inputs, said)


class _NoText(Exception):
    """No text could be turned into token ids, and why."""


def _of_text(directory: ModelDirectory, tokens: int, vocabulary: int, seed: int) -> Tensor:
    from transformers import AutoTokenizer

    if not any((directory.path / name).is_file() for name in TOKENIZERS):
        raise _NoText("the folder has no tokenizer")
    try:
        from pydoc_data.topics import topics  # Python's language reference, which every Python brings along
    except ImportError as error:
        raise _NoText("this Python lacks its documentation") from error
    texts = [topics[name] for name in sorted(topics)]
    random.Random(seed).shuffle(texts)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory.path, **LOCAL)
        ids: list[int] = []
        for text in texts:
            ids += tokenizer(text, verbose=False)["input_ids"]
            if len(ids) >= tokens:
                break
    except Exception as error:  # a tokenizer may need a library that is not there
        lines = str(error).strip().splitlines() or [""]
        raise _NoText(f"its tokenizer could not be used: {type(error).__name__}: {lines[0]}") from error
    if len(ids) < tokens:
        raise _NoText(f"the text has only {len(ids)} tokens")
    if max(ids[:tokens]) >= vocabulary:
        raise _NoText(f"its tokenizer gives ids up to {max(ids)}, and the model knows {vocabulary}")
    return torch.tensor([ids[:tokens]])
