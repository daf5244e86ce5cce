"""Model folders for tests, and what lies in a folder."""

from pathlib import Path

import torch


def save_mixtral(folder: Path, **options) -> Path:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
    )
    MixtralForCausalLM(config).save_pretrained(folder, **options)
    return folder


def listing(folder: Path) -> list[str]:
    """Everything below a folder, hidden files too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
