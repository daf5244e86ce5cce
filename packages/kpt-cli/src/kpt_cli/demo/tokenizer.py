"""A byte-level BPE tokenizer, trained on the corpus, and token streams made with it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .corpus import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_FILE = "<|endoftext|>"
#: Files are taken evenly until this many characters: more changes the merges little and costs seconds.
TRAINING_CHARACTERS = 4_000_000


def train_tokenizer(sources: Sequence[Source], vocabulary: int, context: int) -> "PreTrainedTokenizerFast":
    """Learn the merges.

    Args:
        sources: what to learn from.
        vocabulary: number of entries.
        context: longest input that the model is meant for.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_FILE],
        # Every byte has a token, so that nothing is unknown.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(sources), trainer)
    make: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer, eos_token=END_OF_FILE, bos_token=END_OF_FILE, model_max_length=context
    )
    return fast


def _sample(sources: Sequence[Source]) -> list[str]:
    step = max(1, sum(len(source.text) for source in sources) // TRAINING_CHARACTERS)
    return [source.text for source in sources[::step]]


def encode(tokenizer: "PreTrainedTokenizerFast", sources: Sequence[Source]) -> Tensor:
    """All files as one stream of token ids, an end-of-file token after each."""
    end = tokenizer.convert_tokens_to_ids(END_OF_FILE)
    encodings = tokenizer.backend_tokenizer.encode_batch([source.text for source in sources])
    return torch.cat([torch.tensor([*encoding.ids, end]) for encoding in encodings])
