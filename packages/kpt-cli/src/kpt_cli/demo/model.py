"""The model: a small Qwen3-MoE, made from its config, saved and loaded the way every Hugging Face model is."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kpt_cli.errors import CliError

from .sizes import Size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

#: Weight of the load-balancing loss, which keeps the router from using a few experts only.
BALANCE_WEIGHT = 0.01
#: Of the initial weights. Larger than the usual 0.02, with which so narrow a model takes hundreds of steps to begin.
INITIAL_DEVIATION = 0.05
#: Beyond a training window too: rotary positions reach further, and speed is measured with longer prompts.
LONGEST = 1024


def quiet_transformers() -> None:
    """No progress bars and no hints of the library: the demo says itself what it does."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def new_model(size: Size, seed: int) -> "Qwen3MoeForCausalLM":
    """A model with random weights whose experts KPT serves, from the first training step on."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import kpt_moe.transformers  # noqa: F401  registers the experts implementation "kpt"

    config = Qwen3MoeConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        num_experts=size.experts,
        num_experts_per_tok=size.experts_per_token,
        moe_intermediate_size=size.expert_size,
        norm_topk_prob=True,
        initializer_range=INITIAL_DEVIATION,
        router_aux_loss_coef=BALANCE_WEIGHT,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    make: Any = Qwen3MoeForCausalLM._from_config
    model: Qwen3MoeForCausalLM = make(config, experts_implementation="kpt")
    return model


def save_model(model: "Qwen3MoeForCausalLM", tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Write weights, config and tokenizer to a new folder.

    Raises:
        CliError: the libraries could not write them.
    """
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(str(folder))
    except OSError:
        raise
    except Exception as error:  # safetensors and tokenizers have their own errors for a full disk
        raise CliError(f"the model could not be written: {error}; make room or choose another folder") from error


def load_model(folder: Path) -> Any:
    """Load a model as its user would: nothing is asked of transformers, so its own default serves the experts."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval()


def describe(model: "Qwen3MoeForCausalLM", size: Size) -> dict[str, Any]:
    """What the model is, for the report."""
    every_expert = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "architecture": type(model).__name__,
        "parameters": parameters,
        "active_parameters": parameters - every_expert * (size.experts - size.experts_per_token) // size.experts,
        "layers": size.layers,
        "experts": size.experts,
        "experts_per_token": size.experts_per_token,
        "hidden_size": size.hidden_size,
        "expert_size": size.expert_size,
        "vocabulary": size.vocabulary,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
