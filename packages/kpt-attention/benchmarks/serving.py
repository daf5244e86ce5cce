# ruff: noqa: T201  printing is its job
"""Time transformers' continuous batching with "kpt" beside its own implementations, on the same requests.

    python packages/kpt-attention/benchmarks/serving.py --requests 16 --prompt 512 --new 32

The model is a Llama of random weights. A line for each implementation: seconds, new tokens a second, and whether the
tokens are those of the first.
"""

import argparse
import logging
import time

import torch


def main() -> None:
    """Print the table."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from kpt_attention.transformers import enable_continuous_batching

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 1000, (asked.prompt,), generator=generator).tolist() for _ in range(asked.requests)]
    told = GenerationConfig(max_new_tokens=asked.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    first: list[list[int]] = []
    for name in ("kpt", "sdpa", "paged|eager"):
        config = LlamaConfig(
            hidden_size=512, intermediate_size=1024, num_hidden_layers=asked.layers, num_attention_heads=8,
            num_key_value_heads=2, vocab_size=1000, max_position_embeddings=4096,
        )  # fmt: skip
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, attn_implementation=name).to(getattr(torch, asked.dtype)).eval()
        if name == "kpt":
            enable_continuous_batching(model)
        best = float("inf")
        for _ in range(asked.rounds):
            start = time.perf_counter()
            found = model.generate_batch(prompts, generation_config=told)
            best = min(best, time.perf_counter() - start)
        got = [found[f"req_{place}"].generated_tokens for place in range(asked.requests)]
        first = first or got
        same = sum(map(list.__eq__, got, first))
        rate = asked.requests * asked.new / best
        print(f"{name}: {best:.2f} s, {rate:.0f} tokens/s, {same} of {asked.requests} alike", flush=True)


if __name__ == "__main__":
    main()
