# ruff: noqa: T201  printing is its job
"""Time transformers' continuous batching with "kpt" beside its own implementations, on the same requests.

    python packages/kpt-attention/benchmarks/serving.py --requests 16 --prompt 512 --new 32

The model is a Llama of random weights. A line for each implementation: seconds, new tokens a second, and whether the
tokens are those of the first.

With `--caches` it times decoding with caches in pages, and of 8 bits, beside `DynamicCache`, in a Llama as large as
SmolLM-135M.
"""

import argparse
import copy
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
    """Print the middle of the steps' times behind a prompt's keys, tokens a second, and bytes, of each cache."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    import kpt_attention.transformers  # noqa: F401  registers "kpt"
    from kpt_attention.transformers_cache import PagedKVCache

    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192,
    )  # fmt: skip
    # A model for each: the first call behind a switch of implementation costs what no other does.
    models = {
        name: LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name).eval()
        for name in ("sdpa", "kpt")
    }
    models["kpt"].load_state_dict(models["sdpa"].state_dict(), assign=True)
    for model in models.values():
        model.to(getattr(torch, asked.dtype))
    ids = torch.randint(3, 49152, (asked.requests, 1))
    kinds = {
        "DynamicCache, sdpa": ("sdpa", lambda: DynamicCache(config=config)),
        "DynamicCache, kpt": ("kpt", lambda: DynamicCache(config=config)),
        "pages": ("kpt", lambda: PagedKVCache(config)),
        "pages, 8 bits": ("kpt", lambda: PagedKVCache(config, dtype=torch.float8_e4m3fn)),
    }
    made = {name: make() for name, (_, make) in kinds.items()}
    spent: dict[str, list[float]] = {name: [] for name in kinds}
    with torch.no_grad():
        for layer in range(config.num_hidden_layers):
            k, v = torch.randn(2, asked.requests, 3, asked.prompt, 64, dtype=getattr(torch, asked.dtype))
            for cache in made.values():
                cache.update(k, v, layer)
        for _ in range(1 + asked.new):  # a step of each in turn, so that what else the machine does meets all
            for name, (implementation, _) in kinds.items():
                start = time.perf_counter()
                models[implementation](ids, past_key_values=made[name])
                spent[name].append(time.perf_counter() - start)
    for name, cache in made.items():
        middle = sorted(spent[name][1:])[asked.new // 2]  # the first step makes what later ones find
        held = cache.nbytes if isinstance(cache, PagedKVCache) else sum(k.nbytes + v.nbytes for k, v, _ in list(cache))
        rate = asked.requests / middle
        print(f"{asked.dtype}, {name}: {middle * 1e3:.0f} ms a step, {rate:.1f} tokens/s, {held / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
