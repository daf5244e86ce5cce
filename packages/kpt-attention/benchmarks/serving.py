# ruff: noqa: T201  printing is its job
"""Time transformers' continuous batching with "kpt" beside its own implementations, on the same requests.

    python packages/kpt-attention/benchmarks/serving.py --requests 16 --prompt 512 --new 32

The model is a Llama of random weights. A line for each implementation: seconds, new tokens a second, and whether the
tokens are those of the first.

With `--caches` it times decoding with caches in pages, and of 8 bits, beside `DynamicCache`, in a Llama as large as
SmolLM-135M.
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
    parser.add_argument("--caches", action="store_true")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    if asked.caches:
        caches(asked)
        return
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


def caches(asked: argparse.Namespace) -> None:
    """Print seconds of the prompt, tokens a second after it, and bytes, of each cache; the least of the rounds."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    import kpt_attention.transformers  # noqa: F401  registers "kpt"
    from kpt_attention.transformers_cache import PagedKVCache

    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(getattr(torch, asked.dtype)).eval()
    ids = torch.randint(3, 49152, (asked.requests, asked.prompt))
    kinds = {
        "DynamicCache, sdpa": ("sdpa", lambda: DynamicCache(config=config)),
        "DynamicCache, kpt": ("kpt", lambda: DynamicCache(config=config)),
        "pages": ("kpt", lambda: PagedKVCache(config)),
        "pages, 8 bits": ("kpt", lambda: PagedKVCache(config, dtype=torch.float8_e4m3fn)),
    }
    best: dict[str, list[float]] = {name: [float("inf")] * 2 for name in kinds}
    held = {}
    for _ in range(asked.rounds):
        for name, (implementation, make) in kinds.items():
            model.set_attn_implementation(implementation)
            cache, spent = make(), []
            with torch.no_grad():
                last = ids
                for _ in range(asked.new):
                    start = time.perf_counter()
                    logits = model(last, past_key_values=cache, logits_to_keep=1).logits
                    last = logits.argmax(-1)
                    spent.append(time.perf_counter() - start)
            best[name] = [min(pair) for pair in zip(best[name], (spent[0], sum(spent[1:])), strict=True)]
            print(f"{name}: {spent[0]:.2f} s, then {sum(spent[1:]):.2f} s", flush=True)
            held[name] = getattr(cache, "nbytes", None) or sum(k.nbytes + v.nbytes for k, v, _ in list(cache))
    for name, (prompt, rest) in best.items():
        rate = asked.requests * (asked.new - 1) / rest
        print(f"{asked.dtype}, {name}: prompt {prompt:.2f} s, {rate:.1f} tokens/s, {held[name] / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
