"""Models of transformers with KPT's layers, and back."""

import copy
import pickle

import pytest
import torch

from conversion_models import CONVERTED, PROMPT, assert_close, assert_same_model, blocks_of, build, logits
from families import experts_of
from kpt_moe import BiasBalancer, FeedForwardExpert, MoELayer, TopKRouter
from kpt_moe.activations import Activation
from kpt_moe.batch_invariant import batch_invariant
from kpt_moe.conversion import KptMoEBlock, VariantFeedForwardExpert, to_kpt_layers, to_transformers
from kpt_moe.routing_trace import record_routing

pytestmark = pytest.mark.usefixtures("quiet")


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
    back = to_transformers(converted, inplace=True)
    compared = 0
    for have, want in zip(back.parameters(), model.parameters(), strict=True):
        if want.grad is None:
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
    weight = blocks_of(converted)[0].router.weight
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


def test_names_shapes_and_memory_stay_in_place():
    for name in ("deepseek_v3", "ernie4_5_moe", "nemotron_h", "hunyuan_v1_moe"):
        model = build(name)
        before = {path: (tensor.shape, tensor.data_ptr()) for path, tensor in model.state_dict().items()}
        to_kpt_layers(model, inplace=True)
        assert {path: (tensor.shape, tensor.data_ptr()) for path, tensor in model.state_dict().items()} == before, name


def test_a_copy_shares_no_memory():
    model = build("qwen2_moe")
    converted = to_kpt_layers(model)
    ours = {parameter.untyped_storage().data_ptr() for parameter in converted.parameters()}
    assert ours.isdisjoint(parameter.untyped_storage().data_ptr() for parameter in model.parameters())


def test_a_block_by_itself():
    block = build("mixtral").model.layers[0].mlp
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
    layers = {name: blocks_of(to_kpt_layers(build(name)))[0] for name in ("deepseek_v3", "gpt_oss", "qwen2_moe")}
    assert all(isinstance(layer, MoELayer) and isinstance(layer.router, TopKRouter) for layer in layers.values())
    router = layers["deepseek_v3"].router
    assert (router.score_function, router.renormalize, router.scale) == ("sigmoid", True, 2.5)
    assert (router.num_groups, router.top_groups) == (2, 1)
    assert isinstance(layers["deepseek_v3"].experts, FeedForwardExpert)
    assert layers["qwen2_moe"].shared_gate is not None
    assert layers["deepseek_v3"].shared_gate is None
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
    assert blocks_of(converted)[0].router.correction_bias.dtype is torch.float32
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
    before = blocks_of(converted)[0].router.correction_bias.clone()
    logits(converted)
    balancer.step()
    bias = blocks_of(converted)[0].router.correction_bias
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


def test_in_batch_invariant_mode_shared_experts_take_each_token_by_itself():
    block = blocks_of(to_kpt_layers(build("qwen2_moe")))[0]
    x = torch.randn(3, 9, 32)
    with torch.no_grad(), batch_invariant():
        whole = block(x)
        assert torch.equal(whole[:1, :4], block(x[:1, :4]))
    with torch.no_grad():
        assert_close(whole, block(x))
