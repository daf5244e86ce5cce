"""What a model is run on while it is measured: a real text if there is a tokenizer, else random token ids."""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kpt_cli.errors import CliError

from .model_directory import ModelDirectory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DEFAULT_TOKENS = 512
#: One of these says that the folder has a tokenizer.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleInputs:
    """Keyword arguments of the model's forward, and a sentence that says what they are."""

    kwargs: "dict[str, Tensor]"
    said: str


def example_inputs(
    directory: ModelDirectory, config: Any, tokens: int | None, device: "torch.device", seed: int
) -> ExampleInputs:
    """Make one sequence; the same seed gives the same one.

    Args:
        directory: the model's folder, whose tokenizer is used.
        config: the loaded model's config.
        tokens: length of the sequence; None gives 512, or what the model can read.
        device: where the token ids go.
        seed: decides which text, or which random ids.

    Raises:
        CliError: the model can't read so many tokens.
    """
    import torch

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
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocabulary, (1, tokens), generator=generator)
        said = f"{tokens} random token ids ({why})"
    kwargs = {"input_ids": ids.to(device)}
    if getattr(config, "is_encoder_decoder", False):
        kwargs["decoder_input_ids"] = kwargs["input_ids"]
    return ExampleInputs(kwargs=kwargs, said=said)


class _NoText(Exception):
    """Why no text could be turned into token ids."""


def _of_text(directory: ModelDirectory, tokens: int, vocabulary: int, seed: int) -> "Tensor":
    import torch
    from transformers import AutoTokenizer

    if not any((directory.path / name).is_file() for name in TOKENIZERS):
        raise _NoText("the folder has no tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory.path, local_files_only=True, trust_remote_code=False)
        ids: list[int] = []
        for paragraph in _text(seed):
            ids += tokenizer(paragraph, verbose=False)["input_ids"]
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


def _text(seed: int) -> list[str]:
    """Python's language reference, which every Python brings along, its topics shuffled."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise _NoText("this Python lacks its documentation") from error
    texts = [topics[name] for name in sorted(topics)]
    random.Random(seed).shuffle(texts)
    return texts
