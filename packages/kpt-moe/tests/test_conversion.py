"""Models of transformers with KPT's layers, and back."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from families import _LATENT_ATTENTION, _NUM_EXPERTS, _ROUTED_EXPERTS, FAMILIES, Family, experts_of
from kpt_core import InputError
from kpt_moe import Activation, BiasBalancer, FeedForwardExpert, MoELayer, Routing, TopKRouter, record_routing
from kpt_moe.batch_invariant import batch_invariant
from kpt_moe.conversion import KptMoEBlock, VariantFeedForwardExpert, to_kpt_layers, to_transformers
from network_checks import (
    EXPERTS,
    ROUTINGS,
    check_compiles,
    check_copies,
    check_gradients,
    check_low_precision,
    randomised,
)
from oracle import activate

pytestmark = pytest.mark.usefixtures("quiet")

MORE = {
    "deepseek_v2": Family(
        model="DeepseekV2ForCausalLM",
        config="DeepseekV2Config",
        values={
            **_ROUTED_EXPERTS,
            **_LATENT_ATTENTION,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "head_dim": 4,
        },
        experts=1,
    ),
    "dots1": Family(
        model="Dots1ForCausalLM",
        config="Dots1Config",
        values={**_ROUTED_EXPERTS, "head_dim": 8, "first_k_dense_replace": 0},
    ),
    "minimax_m2": Family(
        model="MiniMaxM2ForCausalLM", config="MiniMaxM2Config", values={"num_local_experts": 6, "head_dim": 8}
    ),
    "hunyuan_v1_moe": Family(
        model="HunYuanMoEV1ForCausalLM",
        config="HunYuanMoEV1Config",
        values={"num_experts": 6, "moe_topk": 3, "head_dim": 8},
    ),
    "flex_olmo": Family(model="FlexOlmoForCausalLM", config="FlexOlmoConfig", values=_NUM_EXPERTS),
}
REFUSED = {
    "phimoe": "PhimoeSparseMoeBlock: its router weighs experts as no TopKRouter does",
    "lfm2_moe": "Lfm2MoeSparseMoeBlock: its router weighs experts as no TopKRouter does",
    "muse_spark": "MuseSparkMoE: must consist of a router, experts and perhaps shared experts",
    "gemma4": "Gemma4TextDecoderLayer: must consist of",
    "inkling2": "Inkling2SparseMoeBlock: the activation of the experts is none of ours",
    "minimax_m3_vl": "MiniMaxM3VLDenseMLP: what it computes is none of",
    "deepseek_v4": "DeepseekV4MLP: what it computes is none of",
}
CONVERTED = {name: family for name, family in {**FAMILIES, **MORE}.items() if name not in REFUSED}
PROMPT = torch.tensor([[5, 11, 7, 30, 8, 21, 3], [9, 2, 40, 4, 4, 17, 28]])


def build(name: str) -> PreTrainedModel:
    return CONVERTED[name].build()


def logits(model: nn.Module, **choices: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(PROMPT, **choices).logits
    return out


def blocks_of(model: nn.Module) -> list[KptMoEBlock]:
    return [module for module in model.modules() if isinstance(module, KptMoEBlock)]


def assert_close(have: Tensor, want: Tensor, relative: float = 1e-5) -> None:
    torch.testing.assert_close(have, want, rtol=0, atol=relative * want.abs().max().item())


def assert_same_model(have: PreTrainedModel, want: PreTrainedModel, *, loaded: bool = False) -> None:
    assert repr(have) == repr(want)
    assert [type(module) for module in have.modules()] == [type(module) for module in want.modules()]
    assert list(have.state_dict()) == list(want.state_dict())
    for (name, a), b in zip(have.state_dict().items(), want.state_dict().values(), strict=True):
        assert a.dtype is b.dtype, name
        assert torch.equal(a, b), name
    for (_, a), (_, b) in zip(have.named_parameters(), want.named_parameters(), strict=True):
        assert a.is_contiguous() == b.is_contiguous()
        # A frozen parameter of a class is not frozen in what from_pretrained makes of it.
        assert loaded or a.requires_grad == b.requires_grad


@pytest.mark.parametrize("name", CONVERTED)
def test_computes_the_same_and_comes_back_bit_for_bit(name):
    model = build(name)
    before, told = copy.deepcopy(model), []
    handles = [
        experts.register_forward_pre_hook(lambda _, args: told.append(args[1].sort().values))
        for experts in experts_of(model)
    ]
    want = logits(model)
    for handle in handles:
        handle.remove()

    converted = to_kpt_layers(model, strict=True)
    assert len(blocks_of(converted)) == CONVERTED[name].experts
    assert experts_of(converted) == []
    with record_routing(converted) as trace:
        assert_close(logits(converted), want)
    chosen = [call.index.sort().values for calls in trace.calls.values() for call in calls]
    assert len(chosen) == len(told)
    assert all(torch.equal(have, index) for have, index in zip(chosen, told, strict=True))

    assert_same_model(model, before)
    back = to_transformers(converted)
    assert_same_model(back, before)
    assert torch.equal(logits(back), want)
    assert len(blocks_of(converted)) == CONVERTED[name].experts, "the converted model must stay"
    assert_close(logits(converted), want)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "qwen2_moe", "gpt_oss"])
def test_gradients_are_the_same(name):
    model = build(name).train()
    model(PROMPT, labels=PROMPT).loss.backward()
    converted = to_kpt_layers(model)
    converted.zero_grad()
    converted(PROMPT, labels=PROMPT).loss.backward()
    fused = [
        shared.gate_up_proj.weight.grad.chunk(2) for b in blocks_of(converted) if (shared := b.layer.shared_experts)
    ]
    back = to_transformers(converted, inplace=True)
    theirs = [parameter for name, parameter in model.named_parameters() if "shared" in name and "up_proj" in name]
    theirs = [theirs, [p for name, p in model.named_parameters() if "shared" in name and "gate_proj" in name]]
    for gate_and_up, up, gate in zip(fused, *theirs, strict=True):
        for have, want in zip(gate_and_up, (gate, up), strict=True):
            assert_close(have, want.grad)
    compared = 0
    for (path, have), want in zip(back.named_parameters(), model.parameters(), strict=True):
        if want.grad is None or ("shared" in path and ("gate_proj" in path or "up_proj" in path)):
            continue
        assert_close(have.grad, want.grad, 1e-4)
        compared += 1
    assert compared > 10


@pytest.mark.parametrize("hooked_before", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "olmoe", "granitemoe", "gpt_oss", "jamba", "qwen3_moe"])
def test_router_logits_and_auxiliary_loss(name, hooked_before):
    model = build(name)
    if hooked_before:
        logits(model, output_router_logits=True)
    converted = to_kpt_layers(model)
    want = model(PROMPT, labels=PROMPT, output_router_logits=True)
    have = converted(PROMPT, labels=PROMPT, output_router_logits=True)
    assert len(have.router_logits) == len(want.router_logits) > 0
    for ours, theirs in zip(have.router_logits, want.router_logits, strict=True):
        assert_close(ours, theirs)
    torch.testing.assert_close(have.aux_loss, want.aux_loss)
    torch.testing.assert_close(have.loss, want.loss)
    weight = blocks_of(converted)[0].layer.router.weight
    (grad,) = torch.autograd.grad(have.aux_loss, weight)
    assert grad.abs().sum() > 0
    back = to_transformers(converted, inplace=True)
    assert len(back(PROMPT, output_router_logits=True).router_logits) == len(want.router_logits)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "jamba"])
def test_generates_the_same_tokens(name):
    model = build(name)
    choices = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    prompt = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    assert torch.equal(to_kpt_layers(model).generate(**prompt, **choices), model.generate(**prompt, **choices))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "ernie4_5_moe"])
def test_is_saved_and_loaded_after_the_way_back(name, tmp_path):
    model = to_kpt_layers(build(name), inplace=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()
    want = logits(model)
    back = to_transformers(model, inplace=True)
    back.save_pretrained(tmp_path)
    loaded = type(back).from_pretrained(tmp_path)
    assert_same_model(loaded.train(False), back, loaded=True)
    assert_close(logits(loaded), want)
    assert not torch.allclose(want, logits(build(name)), atol=1e-3), "the step must have changed something"


def test_in_place_moves_the_parameters_themselves():
    model = build("mixtral")
    before = {id(parameter) for parameter in model.parameters()}
    converted = to_kpt_layers(model, inplace=True)
    assert converted is model
    assert {id(parameter) for parameter in model.parameters()} == before
    assert to_transformers(model, inplace=True) is model
    assert {id(parameter) for parameter in model.parameters()} == before


def test_only_gate_and_up_of_shared_experts_are_new_in_place():
    model = build("deepseek_v3")
    before = {id(parameter) for parameter in model.parameters()}
    bias = dict(model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
    to_kpt_layers(model, inplace=True)
    new = [name for name, parameter in model.named_parameters() if id(parameter) not in before]
    assert new == ["model.layers.1.mlp.layer.shared_experts.gate_up_proj.weight"]
    assert blocks_of(model)[0].layer.router.correction_bias.data_ptr() == bias.data_ptr()


def test_a_copy_shares_no_memory():
    model = build("qwen2_moe")
    converted = to_kpt_layers(model)
    ours = {parameter.untyped_storage().data_ptr() for parameter in converted.parameters()}
    assert ours.isdisjoint(parameter.untyped_storage().data_ptr() for parameter in model.parameters())


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_map_is_refused_by_name(name):
    model = FAMILIES[name].build()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(InputError, match=REFUSED[name]):
        to_kpt_layers(model, inplace=True, strict=True)
    with pytest.warns(UserWarning, match=f"{REFUSED[name]}.*It stays as it is"):
        assert to_kpt_layers(model, inplace=True) is model
    assert [type(module) for module in model.modules()] == kinds


def tiny_mixtral(**values: Any) -> MixtralForCausalLM:
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, **values)).eval()


def test_jitter_that_experts_see_is_refused():
    with pytest.raises(InputError, match=r"MixtralSparseMoeBlock: .*in training"):
        to_kpt_layers(tiny_mixtral(router_jitter_noise=0.1), strict=True)


class ScaledBlock(type(tiny_mixtral().model.layers[0].mlp)):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 0.5 * super().forward(hidden_states)


class CappedGate(type(tiny_mixtral().model.layers[0].mlp.gate)):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        logits, weights, index = super().forward(hidden_states)
        return logits.tanh(), weights, index


@pytest.mark.parametrize(
    ("part", "kind", "reason"),
    [
        ("", ScaledBlock, "its result is not the sum"),
        (".gate", CappedGate, "does not give its logits first"),
    ],
)
def test_what_a_block_computes_is_asked_of_it(part, kind, reason):
    model = tiny_mixtral()
    model.get_submodule(f"model.layers.1.mlp{part}").__class__ = kind
    with pytest.warns(UserWarning, match=rf"model\.layers\.1\.mlp .*{reason}"):
        converted = to_kpt_layers(model)
    assert len(blocks_of(converted)) == 1
    assert_close(logits(converted), logits(model))
    assert_same_model(to_transformers(converted), model)


def test_a_replaced_forward_is_refused():
    model = tiny_mixtral()
    block = model.model.layers[0].mlp
    block.forward = block.forward
    with pytest.raises(InputError, match="forward of the block was replaced"):
        to_kpt_layers(model, strict=True)


def test_models_without_a_block_are_refused():
    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=48, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4)
    )
    with pytest.raises(InputError, match="LlamaForCausalLM has no Mixture-of-Experts block"):
        to_kpt_layers(dense)
    with pytest.raises(InputError, match="LlamaForCausalLM has no block that to_kpt_layers replaced"):
        to_transformers(dense)


def test_a_block_by_itself():
    block = tiny_mixtral().model.layers[0].mlp
    x = torch.randn(2, 5, 32)
    converted = to_kpt_layers(block)
    assert isinstance(converted, KptMoEBlock)
    torch.testing.assert_close(converted(x), block(x))
    assert type(to_transformers(converted)) is type(block)


def test_the_user_s_hooks_do_not_see_the_questions():
    model = build("qwen2_moe")
    calls = []
    for module in model.modules():
        module.register_forward_hook(lambda module, *_: calls.append(type(module)))
    to_kpt_layers(model)
    assert calls == []


def test_random_numbers_stay_where_they_were():
    model, state = build("deepseek_v3"), torch.get_rng_state()
    to_kpt_layers(model, inplace=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_layer_is_what_its_parts_say():
    layers = {name: blocks_of(to_kpt_layers(build(name)))[0].layer for name in ("deepseek_v3", "gpt_oss", "qwen2_moe")}
    assert all(isinstance(layer, MoELayer) and isinstance(layer.router, TopKRouter) for layer in layers.values())
    router = layers["deepseek_v3"].router
    assert (router.score_function, router.renormalize, router.scale) == ("sigmoid", True, 2.5)
    assert (router.num_groups, router.top_groups) == (2, 1)
    assert isinstance(layers["deepseek_v3"].experts, FeedForwardExpert)
    assert layers["qwen2_moe"].shared_experts.gate is not None
    assert isinstance(layers["gpt_oss"].experts, VariantFeedForwardExpert)
    assert layers["gpt_oss"].experts.activation == Activation("swiglu", 1.702, 1.0, 1.5, interleaved=True)
    assert layers["gpt_oss"].router.bias is not None


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "ernie4_5_moe"])
def test_copies_and_pickles(name):
    model = build(name)
    converted = to_kpt_layers(model)
    want = logits(converted)
    for same in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert torch.equal(logits(same), want)
        assert torch.equal(logits(same, output_router_logits=False), want)
        assert_same_model(to_transformers(same), model)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_block_compiles_without_a_break(name):
    block = blocks_of(to_kpt_layers(build(name)))[0]
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 5, 32, requires_grad=True)
    (have, *_), (want, *_) = (out if isinstance(out, tuple) else (out,) for out in (compiled(x), block(x)))
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
    wanted = [x, *block.parameters()]
    grads = [torch.autograd.grad(out.sin().sum(), wanted) for out in (have, want)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_bfloat16_model():
    model = build("deepseek_v3")
    model.config.dtype = torch.bfloat16
    low = copy.deepcopy(model).to(torch.bfloat16)
    converted = to_kpt_layers(low)
    out = logits(converted)
    assert out.dtype is torch.bfloat16
    assert blocks_of(converted)[0].layer.router.correction_bias.dtype is torch.float32
    assert_close(out.float(), logits(model), 0.1)
    assert_same_model(to_transformers(converted), low)


def test_moves_to_another_dtype_in_between():
    model = build("gpt_oss")
    assert_same_model(to_transformers(to_kpt_layers(model).double()), copy.deepcopy(model).double())


def test_model_on_meta():
    config = copy.deepcopy(build("qwen2_moe").config)
    with torch.device("meta"):
        model = type(build("qwen2_moe"))(config)
        converted = to_kpt_layers(model)
    assert {parameter.device.type for parameter in converted.parameters()} == {"meta"}
    assert list(to_transformers(converted).state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("name", ["deepseek_v3", "ernie4_5_moe", "minimax_m2"])
def test_a_balanced_bias_comes_back(name):
    model = build(name)
    converted = to_kpt_layers(model).train()
    balancer = BiasBalancer(converted, rate=0.25)
    before = blocks_of(converted)[0].layer.router.correction_bias.clone()
    logits(converted)
    balancer.step()
    bias = blocks_of(converted)[0].layer.router.correction_bias
    assert not torch.equal(bias, before)
    want = logits(converted.eval())
    back = to_transformers(converted)
    (theirs, *_) = [tensor for path, tensor in back.state_dict().items() if "e_score_correction_bias" in path]
    assert torch.equal(theirs.flatten(), bias)
    assert_close(logits(back), want)


def test_training_mode_and_frozen_parameters_are_kept():
    model = build("qwen2_moe").train()
    for parameter in model.model.layers[0].mlp.parameters():
        parameter.requires_grad_(False)
    converted = to_kpt_layers(model)
    first, second = blocks_of(converted)
    assert not any(parameter.requires_grad for parameter in first.parameters())
    assert all(parameter.requires_grad for parameter in second.parameters())
    assert all(module.training for module in converted.modules())
    back = to_transformers(converted)
    assert_same_model(back, model)
    assert all(module.training for module in back.modules())
    assert not any(module.training for module in to_transformers(converted.eval()).modules())
    assert not any(module.training for module in to_kpt_layers(model.eval()).modules())


def test_what_comes_back_owns_its_memory():
    back = to_transformers(to_kpt_layers(build("qwen2_moe")))
    for name, parameter in back.named_parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size(), name


def test_a_block_at_two_places_stays_one():
    model = build("mixtral")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    converted = to_kpt_layers(model)
    assert converted.model.layers[0].mlp is converted.model.layers[1].mlp
    assert isinstance(converted.model.layers[0].mlp, KptMoEBlock)
    assert_close(logits(converted), logits(model))
    back = to_transformers(converted, inplace=True)
    assert back.model.layers[0].mlp is back.model.layers[1].mlp
    assert_same_model(back, model)


def test_partly_frozen_shared_experts_are_refused():
    model = build("qwen2_moe")
    model.model.layers[0].mlp.shared_expert.up_proj.weight.requires_grad_(False)
    with pytest.raises(InputError, match="some of its projections require gradients"):
        to_kpt_layers(model, strict=True)


def test_a_changed_layer_does_not_go_back():
    converted = to_kpt_layers(build("mixtral"))
    blocks_of(converted)[1].layer.router.top_k = 2
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp was changed since .*MixtralSparseMoeBlock"):
        to_transformers(converted)


VARIANTS = [
    (Activation("swiglu", 1.702, 1.0, 0.8, interleaved=True), True),
    (Activation("swiglu", limit=0.5), False),
    (Activation("geglu", interleaved=True), True),
    (Activation("relu2"), True),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("activation", "transposed"), VARIANTS)
def test_variant_experts_equal_the_definition(activation, transposed, bias):
    network = VariantFeedForwardExpert(
        4, 8, 6, activation=activation, transposed=transposed, bias=bias, dtype=torch.float64
    )
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(7, 8, dtype=torch.float64)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    index[2, 1] = ~index[2, 1]
    weights = torch.rand(7, 2, dtype=torch.float64)
    want = torch.zeros_like(x)
    for t in range(7):
        for e, weight in zip(index[t].tolist(), weights[t], strict=True):
            if e < 0:
                continue
            up, down = network.gate_up_proj[e], network.down_proj[e]
            h = x[t] @ up if transposed else up @ x[t]
            h = h + network.gate_up_proj_bias[e] if bias else h
            options = {name: getattr(activation, name) for name in ("alpha", "beta", "limit", "interleaved")}
            a = activate(h, activation.name, **options)
            y = a @ down if transposed else down @ a
            want[t] += weight * (y + network.down_proj_bias[e] if bias else y)
    routing = Routing(index, weights, torch.zeros(7, 4))
    torch.testing.assert_close(network(x, routing), want)


def variant(**place: Any) -> VariantFeedForwardExpert:
    activation = Activation("swiglu", 1.702, 1.0, 7.0, interleaved=True)
    return VariantFeedForwardExpert(EXPERTS, 8, 6, activation=activation, transposed=True, bias=True, **place)


def test_variant_experts_compile_survive_copies_and_run_in_low_precision():
    check_compiles(randomised(variant(dtype=torch.float64)))
    check_copies(variant)
    check_low_precision(variant)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_gradients_of_variant_experts_are_those_of_differences(kind):
    check_gradients(randomised(variant(dtype=torch.float64)), torch.randn(6, 8, dtype=torch.float64), ROUTINGS[kind](6))


def test_variant_experts_refuse_what_they_have_not():
    network = VariantFeedForwardExpert(4, 8, 6, activation=Activation("swiglu", interleaved=True), bias=True)
    assert not network.gate_up_proj_bias.any()
    assert not network.down_proj_bias.any()
    routing = Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), torch.zeros(3, 4))
    with batch_invariant(), pytest.raises(InputError, match="no batch-invariant form"):
        network(torch.randn(3, 8), routing)
    with pytest.raises(InputError, match="intermediate_size must be a positive integer; got 0"):
        VariantFeedForwardExpert(4, 8, 0, activation=Activation("swiglu"))
