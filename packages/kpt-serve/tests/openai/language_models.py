"""A small language model with its tokenizer and chat template, and servers of it."""

import contextlib
import socket
import string
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import torch

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def save_model(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    letters = string.printable[:95] + "\n"
    vocabulary = {letter: place for place, letter in enumerate(letters)} | {"<end>": 96, "<unknown>": 97}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unknown>", eos_token="<end>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        initializer_range=0.3,  # else all tokens are as likely, and the first ones repeat
    )
    model = Qwen3MoeForCausalLM(config)
    # Ids without a letter, and the end, never come.
    model.lm_head.weight.data[94:] = 0
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def served(folder: Path, *options: str, tls: bool = False):
    """Start a server and yield it and its address once it is ready; end it whatever happens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "kpt_serve.openai", str(folder), "--port", str(port), *options]
    log = (folder.parent / f"{port}.log").open("w+")
    process = subprocess.Popen(command, stdout=log, stderr=log)
    address = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, Path(log.name).read_text()
            with contextlib.suppress(httpx2.TransportError):
                if httpx2.get(f"{address}/ready", verify=False).status_code == 200:
                    break
            time.sleep(0.1)
        yield process, address
    finally:
        process.kill()
        process.wait()
        log.close()
