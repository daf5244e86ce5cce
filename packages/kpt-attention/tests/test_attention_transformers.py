"""Models of transformers with `attn_implementation="kpt"` beside eager ones: logits, gradients, padding, generation."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

from kpt_attention import attention
from kpt_attention import causal as kpt_causal
from kpt_attention.transformers import enable_continuous_batching, kpt_attention_forward  # registers "kpt", too
from kpt_core import InputError, KptWarning, record
from kpt_core.shared_config import SwitchWatch

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
#: Decoders, and what of their configuration matters here.
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    "Gemma2": {"sliding_window": 5, "attn_logit_softcapping": 2.0},
    "Gemma3Text": {"sliding_window": 5},
    "GptOss": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Mistral": {"sliding_window": 5},
    "Phi3": {"sliding_window": 5},
    "Cohere2": {"sliding_window": 5},
    "Olmo2": {},
    "Exaone4": {"sliding_window": 5, "sliding_window_pattern": 2},
    "SmolLM3": {},
    "Granite": {},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    },
    "Llama4Text": {
        "num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 6, "moe_layers": [],
    },
}  # fmt: skip


def decoder(family: str, implementation: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **DECODERS[family]})
    if family == "Gemma3Text":
        model = transformers.Gemma3ForCausalLM
    else:
        model = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    made = model._from_config(config, attn_implementation=implementation)
    assert made.config._attn_implementation == implementation
    return made.eval()


def compare(one: Any, other: Any, **inputs: Any) -> None:
    """Hold outputs and all gradients of two models to one another, where the inputs are no padding."""
    keep = inputs.get("attention_mask")
    found = []
    for model in (one, other):
        model.zero_grad()
        out = model(**inputs)
        out = getattr(out, "logits", None) if getattr(out, "logits", None) is not None else out.last_hidden_state
        out = out if keep is None or keep.dim() != 2 or out.shape[1] != keep.shape[1] else out[keep.bool()]
        generator = torch.Generator().manual_seed(3)
        (out * torch.randn(out.shape, generator=generator)).sum().backward()
        found.append((out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=2e-5)
    assert found[0][1].keys() == found[1][1].keys()
    for name, grad in found[0][1].items():
        scale = grad.abs().max().item() + 1
        torch.testing.assert_close(
            grad, found[1][1][name], rtol=1e-3, atol=3e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def tokens(batch: int = 2, length: int = 13) -> Tensor:
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(1))


# GptOss makes its masks without the positions, so that packed sequences see each other, in eager attention too.
@pytest.mark.filterwarnings("ignore:kpt. positions restart")
@pytest.mark.parametrize("family", DECODERS)
def test_decoders_equal_eager(family: str) -> None:
    ours, eager = decoder(family, "kpt"), decoder(family, "eager")
    ids = tokens()
    with record() as calls:
        compare(ours, eager, input_ids=ids)
    assert sum(call.op == "attention.dense" for call in calls) >= 2
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    compare(ours, eager, input_ids=ids, attention_mask=mask)
    positions = torch.cat((torch.arange(5), torch.arange(8)))[None]  # two packed sequences
    if family != "Llama4Text":
        compare(ours, eager, input_ids=ids[:1], position_ids=positions, use_cache=False)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_equals_eager(family: str, cache: str) -> None:
    ids = tokens(length=9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    ids = ids.masked_fill(mask == 0, 0)
    told = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "cache_implementation": cache,
            "disable_compile": True}  # fmt: skip
    ours, eager = (decoder(family, each).generate(ids, **told) for each in ("kpt", "eager"))
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_was_changed_in_place_counts(mode: Any) -> None:
    module = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    with mode():
        mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
        for hidden in (4, 2):
            mask[..., hidden] = False
            got, _ = kpt_attention_forward(module, q, k, v, mask)
            want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            torch.testing.assert_close(got.transpose(1, 2), want)


def test_beams_and_an_assistant_equal_eager() -> None:
    ids = tokens(1, 7)
    ours, eager = decoder("Llama", "kpt"), decoder("Llama", "eager")
    for told in ({"num_beams": 3}, {"assistant_model": "itself"}):
        both = [
            model.generate(
                ids,
                max_new_tokens=6,
                do_sample=False,
                **({"assistant_model": model} if "assistant_model" in told else told),
            )
            for model in (ours, eager)
        ]
        assert torch.equal(*both)


ENCODERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Bert": ("BertModel", {}, {}),
    "ModernBert": ("ModernBertModel", {"local_attention": 6}, {}),
    "ViT": ("ViTModel", {"image_size": 8, "patch_size": 4}, {"pixel_values": (2, 3, 8, 8)}),
    "SiglipVision": ("SiglipVisionModel", {"image_size": 8, "patch_size": 4}, {"pixel_values": (2, 3, 8, 8)}),
}


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_equal_eager(family: str) -> None:
    model, settings, shapes = ENCODERS[family]
    both = []
    for implementation in ("kpt", "eager"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**SMALL, **settings})
        both.append(getattr(transformers, model)._from_config(config, attn_implementation=implementation).eval())
    inputs: dict[str, Tensor] = {name: torch.randn(shape) for name, shape in shapes.items()} or {"input_ids": tokens()}
    compare(*both, **inputs)
    if "input_ids" in inputs:
        mask = torch.ones_like(inputs["input_ids"])
        mask[1, 9:] = 0
        compare(*both, **inputs, attention_mask=mask)


def test_encoder_decoders_equal_eager() -> None:
    for family, settings in (
        ("Whisper", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
                     "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8,
                     "max_source_positions": 16, "decoder_start_token_id": 1}),
        ("T5", {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}),
    ):  # fmt: skip
        both = []
        for implementation in ("kpt", "eager"):
            torch.manual_seed(0)
            config = getattr(transformers, f"{family}Config")(**{**SMALL, **settings})
            made = getattr(transformers, f"{family}ForConditionalGeneration")
            both.append(made._from_config(config, attn_implementation=implementation).eval())
        source = {"input_features": torch.randn(2, 8, 32)} if family == "Whisper" else {"input_ids": tokens()}
        compare(*both, **source, decoder_input_ids=tokens(2, 6))


def test_what_may_change_scores_is_an_error_and_what_can_not_is_taken() -> None:
    model = decoder("Llama", "kpt")
    for given, message in (
        ({"output_attentions": True}, "no attention weights are computed|eager"),
        ({"indices": torch.zeros(1)}, "indices must be .2, 13, chosen keys. integers; got torch.float32 .1."),
        ({"block_indices": torch.zeros(1)}, "passes block_indices and has no indexer"),
        ({"cu_ends": torch.zeros(1)}, "passes 'cu_ends', which this attention does not know"),
        ({"sinks": torch.zeros(1)}, "passes 'sinks', which this attention does not know"),
    ):
        with pytest.raises((InputError, ValueError), match=message):
            model(tokens(), **given)
    plain = model(tokens()).logits
    harmless = (
        "token_type_ids",
        "shift_labels",
        "return_loss",
        "special_tokens_mask",
        "vision_feature_layer",
        "seq_idx",
    )
    torch.testing.assert_close(model(tokens(), **dict.fromkeys(harmless, torch.zeros(2, 13))).logits, plain)


#: Of every way in which a class attends by code of its own.
OWN_CODE = {
    "MPNetModel": "'eager'", "BloomModel": "'eager'", "LongformerModel": "'eager'", "MptModel": "'eager'",
    "FalconModel": "'eager' or 'sdpa'", "SamModel": "'eager' or 'sdpa'", "GitModel": "'eager'",
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_CODE)
def test_classes_with_attention_of_their_own_are_refused_at_load(name: str) -> None:
    made, config = getattr(transformers, name), getattr(transformers, name.replace("Model", "Config"))
    with pytest.raises(InputError, match=f"{name.replace('Model', '')}.* code of its own.*=.?{OWN_CODE[name]}"):
        made._from_config(config(), attn_implementation="kpt")


#: What was wrong without a word: classes that lose queries behind the mask, that make none, that name a module causal
#: which is not, that add their masks, or that choose keys.
UNUSUAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma4Text": ("Gemma4ForCausalLM", {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 5,
                   "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "global_head_dim": 8,
                   "layer_types": ["sliding_attention", "full_attention"] * 2}, {"logits_to_keep": 3}),
    "Splinter": ("SplinterModel", {}, {}),
    "BigBirdPegasus": ("BigBirdPegasusForCausalLM", {"d_model": 32, "decoder_layers": 1, "decoder_ffn_dim": 32,
                       "decoder_attention_heads": 4}, {}),
    "DeepseekV32": ("DeepseekV32Model", DECODERS["DeepseekV3"] | {"index_topk": 4, "index_n_heads": 2,
                    "index_head_dim": 16}, {}),
    "PegasusX": ("PegasusXModel", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32,
                 "decoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                 "num_global_tokens": 4, "block_size": 16}, {"decoder_input_ids": torch.arange(3, 17).view(2, 7)}),
}  # fmt: skip


@pytest.mark.parametrize("family", UNUSUAL)
@pytest.mark.parametrize("padded", [False, True])
def test_unusual_classes_equal_eager(family: str, padded: bool) -> None:
    name, settings, given = UNUSUAL[family]
    made, mask = [], torch.ones_like(tokens())
    mask[0, 9:] = 0
    for implementation in ("kpt", "eager"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**SMALL, **settings})
        model = getattr(transformers, name)._from_config(config, attn_implementation=implementation).eval()
        for each in model.parameters():  # scores that differ, so that a mask matters
            torch.nn.init.normal_(each, std=0.3)
        made.append(model)
    made[1].load_state_dict(made[0].state_dict())
    with record() as calls, torch.no_grad():
        out = [model(input_ids=tokens(), attention_mask=mask if padded else None, **given)[0] for model in made]
    assert any(call.op == "attention.dense" for call in calls)
    keep = mask[:, -3:].bool() if "logits_to_keep" in given else mask.bool()
    if padded and out[0].shape[1] == keep.shape[1]:
        out = [each[keep] for each in out]
    torch.testing.assert_close(*out, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_ends_of_packed_sequences_keep_them_apart_and_are_lowered_once(causal: bool) -> None:
    module, ends, key_ends = torch.nn.Module(), torch.tensor([0, 4, 9]), torch.tensor([0, 6, 11])
    query, key, value = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    given = {"is_causal": causal, "cu_seq_lens_q": ends, "cu_seq_lens_k": key_ends}
    out, _ = kpt_attention_forward(module, query, key, value, None, **given)
    for first, last, begin, end in ((0, 4, 0, 6), (4, 9, 6, 11)):
        rows = query[:, :, first:last], key[:, :, begin:end], value[:, :, begin:end]
        one = attention(*rows, kpt_causal() if causal else None)
        torch.testing.assert_close(out[:, first:last], one.transpose(1, 2))
    plan = ends._kpt_plan[-1]  # type: ignore[attr-defined]
    kpt_attention_forward(module, query, key, value, None, **given)
    assert ends._kpt_plan[-1] is plan  # type: ignore[attr-defined]
    key_ends[1] = 5
    changed, _ = kpt_attention_forward(module, query, key, value, None, **given)
    assert not torch.equal(changed, out)
    with pytest.raises(InputError, match="end at 9 queries and 11 keys; got 9 and 10"):
        kpt_attention_forward(module, query, key[:, :, 1:], value[:, :, 1:], None, **given)


def test_packed_positions_under_a_mask_of_ones_are_told_once() -> None:
    model, ids = decoder("Llama", "kpt"), tokens(1)
    positions = torch.cat((torch.arange(5), torch.arange(8)))[None]
    with pytest.warns(KptWarning, match="positions restart within a row.*leave out attention_mask, and set") as told:
        model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    assert len(told) == 1  # for all layers
    with warnings.catch_warnings():
        warnings.simplefilter("error", KptWarning)
        model(input_ids=ids, position_ids=positions.clone(), use_cache=False)
        model(input_ids=ids, attention_mask=torch.ones_like(ids))


def test_positions_without_a_zero_are_one_sequence() -> None:  # transformers#39814
    ours, eager, ids = decoder("Llama", "kpt"), decoder("Llama", "eager"), tokens(1, 8)
    positions = torch.arange(5, 13)[None]
    with warnings.catch_warnings():
        warnings.simplefilter("error", KptWarning)
        compare(ours, eager, input_ids=ids, position_ids=positions, use_cache=False)
        whole = ours(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(whole, ours(ids, position_ids=positions, use_cache=False).logits)


class Logits(torch.nn.Module):
    """Give a model's logits alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.model(ids, attention_mask=mask, use_cache=False).logits


def test_traced_models_equal_eager() -> None:
    ids = tokens(2, 20)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which is deprecated
        traced = torch.jit.trace(Logits(decoder("Llama", "kpt")), ids)
        torch.testing.assert_close(traced(ids.flip(0)), decoder("Llama", "eager")(ids.flip(0)).logits)


def bert(implementation: str) -> Any:
    torch.manual_seed(0)
    return transformers.BertForMaskedLM._from_config(
        transformers.BertConfig(**SMALL | {"max_position_embeddings": 512}), attn_implementation=implementation
    )


# The others take the same path with fewer masks: Gemma 3 has layers that see all, and layers with a window.
@pytest.mark.parametrize(
    "family",
    [pytest.param("Bert", marks=pytest.mark.slow), pytest.param("Llama", marks=pytest.mark.slow), "Gemma3Text"],
)
def test_compiled_training_takes_as_many_graphs_as_sdpa(family: str) -> None:
    counts = []
    for implementation in ("sdpa", "kpt"):
        torch._dynamo.reset()
        model = bert(implementation) if family == "Bert" else decoder(family, implementation)
        model.eval()  # no dropout
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for length in (7, 140, 12, 300):
            ids = tokens(2, length)
            mask = torch.ones_like(ids)
            mask[0, length // 2 :] = 0
            losses = []
            for run in (compiled, model):
                model.zero_grad()
                loss = run(ids, attention_mask=mask, labels=ids).loss
                loss.backward()
                losses.append((loss, sum(p.grad.abs().sum() for p in model.parameters() if p.grad is not None)))
            torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
        counts.append(counter.frame_count)
    assert counts[1] <= counts[0]


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
def test_a_compiled_step_of_decoding_makes_no_blocks_of_its_mask(family: str) -> None:
    model, ids, graphs = decoder(family, "kpt"), tokens(2, 12), []

    def kept(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    cache = transformers.StaticCache(config=model.config, max_cache_len=200)
    with torch.no_grad():
        wanted = model(ids).logits[:, -3:]
        model(ids[:, :9], past_key_values=cache)
        step = torch.compile(model, backend=kept, fullgraph=True)
        for place in range(9, 12):
            found = step(ids[:, place, None], past_key_values=cache, position_ids=torch.tensor([[place]])).logits
            torch.testing.assert_close(found[:, 0], wanted[:, place - 9], rtol=1e-4, atol=1e-4)
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("attention_dense" in each for each in called)
    assert not any("all_blocks" in each for each in called)


@pytest.mark.parametrize("family", ["Bert", pytest.param("Llama", marks=pytest.mark.slow), "Gemma3Text"])
def test_exported_models_serve_any_batch_and_length(family: str) -> None:
    model = Logits(bert("kpt").eval() if family == "Bert" else decoder(family, "kpt"))
    sizes = {0: Dim("batch", min=1), 1: Dim("tokens", min=1, max=128)}
    ids = tokens(2, 20)
    with torch.no_grad():
        program = torch.export.export(model, (ids, torch.ones_like(ids)), dynamic_shapes=(sizes, sizes)).module()
        for batch, length in ((1, 1), (3, 5), (2, 128)):
            ids = tokens(batch, length)
            mask = torch.ones_like(ids)
            mask[0, : length // 2] = 0
            torch.testing.assert_close(program(ids, mask)[mask.bool()], model(ids, mask)[mask.bool()])


# GPT-OSS has layers that see all beside those with a window, which is all that Llama and Mistral have.
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("Llama", marks=pytest.mark.slow),
        pytest.param("Mistral", marks=pytest.mark.slow),
        "Gemma2",
        "GptOss",
    ],
)
def test_continuous_batching_gives_the_tokens_of_generate(family: str) -> None:
    model = decoder(family, "kpt")
    prompts = [tokens(1, length)[0].tolist() for length in (3, 17, 30, 9)]
    told = transformers.GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1)
    wanted = [
        model.generate(torch.tensor([prompt]), generation_config=told)[0, len(prompt) :].tolist() for prompt in prompts
    ]
    room = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)  # else most of all memory
    found = enable_continuous_batching(model).generate_batch(
        prompts, generation_config=told, continuous_batching_config=room
    )
    assert [found[f"req_{place}"].generated_tokens for place in range(4)] == wanted
    # A model that was not asked, and one that has a name which transformers refuses itself.
    with pytest.raises(InputError, match=r"kpt is not supported .* call kpt_attention.*\.enable_continuous_batching"):
        decoder(family, "kpt").generate_batch(prompts, generation_config=told)
    with pytest.raises(InputError, match="attn_implementation is 'eager': load it with"):
        enable_continuous_batching(decoder(family, "eager"))


def enabled_within(model: Any) -> Any:
    outer = torch.nn.ModuleDict({"inside": model})
    outer.config = model.config
    enable_continuous_batching(outer)
    return model


@pytest.mark.parametrize(
    "enabled",
    [
        lambda model: copy.deepcopy(enable_continuous_batching(model)),
        lambda model: pickle.loads(pickle.dumps(enable_continuous_batching(model))),
        enabled_within,
    ],
    ids=["copied", "pickled", "wrapped"],
)
def test_a_copy_of_a_model_serves_batches_by_its_own_weights(enabled: Any) -> None:
    told = transformers.GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1)
    room = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)
    prompt, model = tokens(1, 17), decoder("Llama", "kpt")
    before = model.generate(prompt, generation_config=told)[0, 17:].tolist()
    made = enabled(model)
    with torch.no_grad():
        made.lm_head.weight.copy_(made.lm_head.weight.flip(0))
    wanted = made.generate(prompt, generation_config=told)[0, 17:].tolist()
    assert wanted != before
    found = made.generate_batch(prompt.tolist(), generation_config=told, continuous_batching_config=room)
    assert [each.generated_tokens for each in found.values()] == [wanted]


def test_a_model_that_another_one_switches_off_says_so():
    one, ids = decoder("Llama", "kpt"), torch.arange(3, 9)[None]
    one(ids)
    copied = pickle.loads(pickle.dumps(one))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.set_attn_implementation("eager")  # on purpose, and no other model is concerned
        one(ids)
        one.set_attn_implementation("kpt")
        compiled = torch.compile(one, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids).logits, one(ids).logits)
    twin = type(one)._from_config(one.config, attn_implementation="kpt")
    twin(ids)
    for model in (one, twin):  # one layer looks for all: a hook takes a module off torch's short way
        hooks = (each for module in model.modules() for each in module._forward_pre_hooks.values())
        assert sum(isinstance(each, SwitchWatch) for each in hooks) == 1
    other = type(one)._from_config(one.config, attn_implementation="eager")
    for switched in (one, twin, copied):
        with warnings.catch_warnings(record=True) as told, record() as log:
            warnings.simplefilter("always")
            for _ in range(2):
                switched(ids)
        messages = [str(each.message) for each in told if each.category is KptWarning]
        if switched is not copied:
            assert [other.config is one.config, log] == [True, []]
            assert len(messages) == 1
            assert "'eager', and LlamaForCausalLM has the same config" in messages[0]
        else:  # has a config of its own
            assert log
            assert not messages
