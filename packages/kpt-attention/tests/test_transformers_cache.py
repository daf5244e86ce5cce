"""`PagedKVCache` beside transformers' `DynamicCache`: tokens, beams, padding, windows, rollbacks, and 8 bits."""

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

import kpt_attention.transformers  # noqa: F401  registers "kpt"
from kpt_attention.transformers_cache import PagedKVCache
from kpt_core import InputError, KptWarning, record

#: What models call their cache: `cache` from transformers 5.24 on.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
#: Decoders, and what of their configuration matters here.
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    "Gemma2": {"sliding_window": 5, "attn_logit_softcapping": 2.0},
    "GptOss": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Mistral": {"sliding_window": 5},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    },
    "Llama4Text": {
        "num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 6, "moe_layers": [],
    },
}  # fmt: skip
#: Those whose attention gets the cache's own keys; DeepSeek's expands them before.
PLAIN = [name for name in DECODERS if name != "DeepseekV3"]


def decoder(family: str, implementation: str = "kpt", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **DECODERS[family], **settings})
    made = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    return made._from_config(config, attn_implementation=implementation).eval()


def prompt(padded: bool = False, batch: int = 2, length: int = 9) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, : 3 * padded] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def generate(model: Any, cache: Any, inputs: dict[str, Tensor], **told: Any) -> Any:
    return model.generate(**inputs, **{CACHE: cache}, max_new_tokens=6, do_sample=False, **told)


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("told", [{"padded": True}, {"num_beams": 3}, {"padded": True, "num_beams": 3}])
def test_tokens_are_those_of_the_dynamic_cache(family: str, told: dict[str, Any]) -> None:
    told = dict(told)
    model, inputs = decoder(family), prompt(told.pop("padded", False))
    cache = PagedKVCache(model.config, page_size=4)
    with record() as calls:
        ours = generate(model, cache, inputs, **told)
    assert torch.equal(ours, generate(model, DynamicCache(config=model.config), inputs, **told))
    used, windows = [call.op for call in calls], sum(layer.window > 0 for layer in cache.layers)
    # Two layers, a prompt and five steps. Pages that beams share, or a window leaves, lie anywhere.
    anywhere = 2 if "num_beams" in told else windows
    assert used.count("attention.paged") == 5 * anywhere
    assert used.count("attention.dense") == 2 + 5 * (2 - anywhere)
    assert used.count("attention.update_cache") == 5 * anywhere + windows


@pytest.mark.parametrize(("family", "implementation"), [("Llama", "eager"), ("Llama", "sdpa"), ("DeepseekV3", "kpt")])
def test_any_attention_reads_pages_that_lie_in_their_order(family: str, implementation: str) -> None:
    model, inputs = decoder(family, implementation), prompt(True)
    cache = PagedKVCache(model.config, page_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KptWarning)
        ours = generate(model, cache, inputs)
    assert torch.equal(ours, generate(model, DynamicCache(config=model.config), inputs))
    layer = cache.layers[0]
    new = [each.new_ones(2, each.shape[2], 1, each.shape[3]) for each in (layer.k, layer.v)]
    keys, values = cache.update(*new, 0)
    assert (keys.data_ptr(), values.data_ptr()) == (layer.k.data_ptr(), layer.v.data_ptr())
    assert keys.shape[2] == cache.get_seq_length() == 9 + 6


@pytest.mark.parametrize(("family", "implementation"), [("Mistral", "sdpa"), ("Gemma2", "eager")])
def test_other_attention_gets_a_dense_copy_and_a_sentence(family: str, implementation: str) -> None:
    model, inputs = decoder(family, implementation), prompt(True)
    with pytest.warns(KptWarning, match="gets a dense copy of them at each step.*attn_implementation='kpt'") as told:
        ours = generate(model, PagedKVCache(model.config, page_size=4), inputs)
    assert len([each for each in told if each.category is KptWarning]) == 1
    assert torch.equal(ours, generate(model, DynamicCache(config=model.config), inputs))


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("parts", [(5, 1, 4, 1, 1, 8), (3, 17)])
@pytest.mark.parametrize("padded", [False, True])
def test_prompts_in_parts_equal_those_at_once(family: str, parts: tuple[int, ...], padded: bool) -> None:
    model, inputs = decoder(family), prompt(padded, length=sum(parts))
    begin, (ours, theirs) = 0, (PagedKVCache(model.config, page_size=4), DynamicCache(config=model.config))
    for part in parts:
        ids, mask = inputs["input_ids"][:, begin : begin + part], inputs["attention_mask"][:, : begin + part]
        begin += part
        with torch.no_grad():
            got, want = (model(ids, attention_mask=mask, **{CACHE: each}).logits for each in (ours, theirs))
        keep = mask[:, -part:].bool()
        # Logits of float32 below 1, after two layers: the sums' order differs.
        torch.testing.assert_close(got[keep], want[keep], rtol=1e-4, atol=1e-5)
        assert ours.get_seq_length() == theirs.get_seq_length() == begin
        for layer in range(len(model.model.layers)):
            assert ours.get_mask_sizes(3, layer) == theirs.get_mask_sizes(3, layer)


def test_a_few_queries_read_pages_that_lie_anywhere_too() -> None:
    for family, served in (("Llama", 0), ("Mistral", 2)):
        model, inputs, cache = decoder(family), prompt(length=16)["input_ids"], None
        cache = PagedKVCache(model.config, page_size=4)
        with torch.no_grad():
            model(inputs[:, :11], **{CACHE: cache})
            with record() as calls:
                model(inputs[:, 11:], **{CACHE: cache})
        assert sum(call.op == "attention.paged" for call in calls) == served


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("length", [3, 9])
def test_guessed_tokens_are_taken_back(family: str, length: int) -> None:
    model, inputs = decoder(family), prompt(length=length, batch=1)
    told = {"prompt_lookup_num_tokens": 3}
    assisted = generate(model, PagedKVCache(model.config, page_size=4), inputs, **told)
    assert torch.equal(assisted, generate(model, None, inputs))
    assert torch.equal(generate(model, None, inputs, assistant_model=decoder("Llama")), assisted)


def test_rows_are_chosen_repeated_cropped_and_forgotten() -> None:
    model, inputs = decoder("Llama"), prompt(length=14)["input_ids"]

    def logits(cache: Any, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return model(ids, **{CACHE: cache}).logits  # type: ignore[no-any-return]

    def both(change: Any) -> None:
        for cache in (ours, theirs):
            change(cache)

    ours, theirs = PagedKVCache(model.config, page_size=4), DynamicCache(config=model.config)
    both(lambda cache: logits(cache, inputs[:, :6]))
    for change, batch in (
        (lambda cache: cache.batch_repeat_interleave(3), 6),
        (lambda cache: cache.batch_select_indices(torch.tensor([5, 0, 0, 3])), 4),
        (lambda cache: cache.crop(-4), 4),
        (lambda cache: cache.reorder_cache(torch.tensor([2, 2, 3, 0])), 4),
        (lambda cache: cache.crop(0), 4),
        (lambda cache: cache.batch_select_indices(torch.tensor([False, True, True, False])), 2),
    ):
        both(change)
        new = torch.randint(3, 64, (batch, 3), generator=torch.Generator().manual_seed(batch))
        torch.testing.assert_close(logits(ours, new), logits(theirs, new), rtol=1e-4, atol=1e-5)
    again = copy.deepcopy(ours)
    assert torch.equal(logits(again, new[:2]), logits(ours, new[:2]))
    ours.reset()
    assert ours.get_seq_length() == ours.nbytes == 0
    torch.testing.assert_close(logits(ours, inputs[:1]), logits(None, inputs[:1]))
    assert not ours.is_compileable
    assert ours.is_croppable


def test_beams_share_pages_and_windows_give_them_back() -> None:
    cache = PagedKVCache(decoder("Llama").config, page_size=4)
    keys = torch.randn(1, 2, 9, 8)
    with torch.no_grad():
        cache.update(keys, keys, 0)
        cache.batch_repeat_interleave(4)
        cache.update(keys[:, :, :1].expand(4, -1, -1, -1), keys[:, :, :1].expand(4, -1, -1, -1), 0)
    assert cache.layers[0].k.shape[0] == 3 + 3  # three rows have a last page of their own
    cache = PagedKVCache(decoder("Mistral").config, page_size=4)
    with torch.no_grad():
        for length in (40, *[1] * 40):
            cache.update(torch.randn(1, 2, length, 8), torch.randn(1, 2, length, 8), 0)
    assert cache.layers[0].k.shape[0] <= 3
    with pytest.raises(InputError, match=r"80 tokens can't be cut to 70: of those in the window of 5"):
        cache.layers[0].crop(-10)


@pytest.mark.parametrize(
    ("family", "implementation", "dtype"),
    [(name, "kpt", torch.float8_e4m3fn) for name in DECODERS]
    + [("Llama", "kpt", torch.float8_e5m2), ("Mistral", "sdpa", torch.float8_e4m3fn)],
)
def test_numbers_of_8_bits_are_near(family: str, implementation: str, dtype: torch.dtype) -> None:
    model, inputs = decoder(family, implementation, initializer_range=0.2), prompt(True, length=16)
    cache, dense = PagedKVCache(model.config, dtype=dtype, page_size=4), DynamicCache(config=model.config)
    mask = inputs["attention_mask"]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PagedKVCache: what does not know", KptWarning)
        for begin, end in ((0, 12), *((place, place + 1) for place in range(12, 16))):
            ids, seen = inputs["input_ids"][:, begin:end], mask[:, :end]
            got, want = (model(ids, attention_mask=seen, **{CACHE: each}).logits for each in (cache, dense))
            if begin == 0:
                keep = mask[:, :12].bool()
                assert torch.equal(got[keep], want[keep])  # prompts attend to their keys as they are
    # A key or value is off by at most 2^-4 of itself (2^-3 in e5m2), in each of two layers.
    off = float((got - want).norm() / want.norm())
    assert 0 < off < (2**-3 if dtype is torch.float8_e4m3fn else 2**-2)
    if family == "Llama":
        assert cache.nbytes <= 2 * 2 * 2 * 16 * 2 * 8  # a byte a number: layers, keys and values, rows, tokens, heads


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("implementation", ["kpt", "sdpa"])
@pytest.mark.filterwarnings("ignore:PagedKVCache. what does not know pages")
def test_encoder_decoders_keep_what_the_encoder_gave_in_pages(implementation: str, beams: int) -> None:
    kinds: Any = transformers
    config = kinds.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = kinds.T5ForConditionalGeneration._from_config(config, attn_implementation=implementation).eval()
    for dtype in (None, torch.float8_e4m3fn):
        cross = PagedKVCache(config, dtype=dtype, page_size=4)
        cache = transformers.EncoderDecoderCache(PagedKVCache(config, page_size=4), cross)
        assert cross.layers[0].keys is None
        inputs = prompt(padded=True)
        ours, theirs = (
            model.generate(**inputs, past_key_values=each, max_new_tokens=6, min_new_tokens=6, num_beams=beams,
                           do_sample=False, output_logits=True, return_dict_in_generate=True)
            for each in (cache, None)
        )  # fmt: skip
        assert cross.get_seq_length() == inputs["input_ids"].shape[1]
        if dtype is None:
            assert torch.equal(ours.sequences, theirs.sequences)
        torch.testing.assert_close(ours.logits[1], theirs.logits[1], rtol=0, atol=1e-5 if dtype is None else 0.1)


def test_zeros_at_first_do_not_cut_what_follows() -> None:
    layer = PagedKVCache(decoder("Llama").config, dtype=torch.float8_e4m3fn).layers[0]
    layer.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))
    ones = torch.ones(1, 2, 1, 8)
    for states in layer.update(ones, 3 * ones):
        assert states.whole()[0, 0, :, 0].tolist()[:3] == [0, 0, 0]
        assert states.whole()[0, 0, 3, 0] in (1, 3)


def test_wrong_input_gets_a_sentence() -> None:
    model, ids = decoder("Llama"), prompt()["input_ids"]
    for told, message in (
        ({"dtype": torch.int8}, r"dtype must be float8_e4m3fn or float8_e5m2.*got torch\.int8"),
        ({"page_size": 0}, "page_size must be at least 1; got 0"),
    ):
        with pytest.raises(InputError, match=message):
            PagedKVCache(model.config, **told)
    with pytest.raises(InputError, match=r"config must be a model's, as model\.config; got LlamaForCausalLM"):
        PagedKVCache(model)
    config = transformers.LlamaConfig(**SMALL)
    config.layer_types = ["hybrid", "full_attention"]
    with pytest.raises(InputError, match="layers of kind 'hybrid'"):
        PagedKVCache(config)
    with torch.no_grad():
        cache = PagedKVCache(transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 1}))
        with pytest.raises(InputError, match="layer 1 of a model writes to a cache of 1 layers"):
            model(ids, **{CACHE: cache})
        cache = PagedKVCache(model.config)
        model(ids, **{CACHE: cache})
        with pytest.raises(InputError, match=r"dim\) \(1, 2, 8\) and .*the cache holds \(2, 2, 8\).*call reset"):
            model(ids[:1], **{CACHE: cache})
        with pytest.raises(InputError, match=r"dim\) \(2, 4, 8\) .*give each model a cache of its own"):
            decoder("Llama", num_key_value_heads=4)(ids, **{CACHE: cache})
        with pytest.raises(InputError, match="as a negative number or 0; got 3"):
            cache.crop(3)
        cache = PagedKVCache(model.config, dtype=torch.float8_e4m3fn)
        model(ids, **{CACHE: cache})
        key, _ = cache.update(torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 8), 0)
        cache.crop(-1)
        with pytest.raises(InputError, match="states of 10 tokens are used where the cache has 9"):
            key.whole()  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"keys that need gradients.*torch\.no_grad"):
        model(ids, **{CACHE: PagedKVCache(model.config)})
