"""Small random models with a tokenizer, written where a test wants them."""

import string
from pathlib import Path

import torch

#: Of sizes that vLLM's kernels for CPUs take: heads of 32, widths that are multiples of 32.
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # else all tokens are as likely
    "bos_token_id": 96,
    "eos_token_id": 96,
}


def save_model(folder: Path, family: str, dtype: torch.dtype = torch.float32, **options: object) -> Path:
    """Write a model of a family of transformers, such as `Mixtral`, with random weights."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    model.lm_head.weight.data[94:] = 0  # ids without a letter, and the end, never come
    model.save_pretrained(folder)
    letters = string.printable[:95] + "\n"
    vocabulary = {letter: place for place, letter in enumerate(letters)} | {"<end>": 96, "<unknown>": 97}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unknown>", eos_token="<end>")
    fast.save_pretrained(folder)
    return folder
