"""Dense models made sparse."""

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from kpt_core import InputError, UnknownNameError
from kpt_moe import MoELayer
from kpt_moe.conversion import upcycle

pytestmark = pytest.mark.usefixtures("quiet")

HIDDEN, INNER = 32, 24
PROMPT = torch.tensor([[5, 11, 7, 30, 8, 21, 3], [9, 2, 40, 4, 4, 17, 28]])
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def randomised(model: nn.Module) -> Any:
    """Parameters large enough for the blocks to matter."""
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(
                torch.randn_like(parameter), alpha=0.1 if parameter.dim() < 2 else parameter.shape[1] ** -0.5
            )
    return model.eval()


def llama(**values: Any) -> LlamaForCausalLM:
    return randomised(LlamaForCausalLM(LlamaConfig(**{**SIZES, **values})))


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(PROMPT).logits
    return out


def layers_of(model: nn.Module) -> list[MoELayer]:
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def assert_same(have: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(have, want, rtol=0, atol=1e-6 * want.abs().max().item())


@pytest.mark.parametrize("router_std", [0.0, 0.02, 3.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"granularity": 3},
        {"granularity": 4},
        {"shared": True},
        {"shared": True, "granularity": 2},
        {"score": "sigmoid"},
        {"router_options": {"correction_bias": True}},
    ],
    ids=str,
)
def test_logits_are_those_of_the_dense_model(options, router_std):
    dense = llama(mlp_bias=True)
    before = copy.deepcopy(dense.state_dict())
    sparse = upcycle(dense, 4, 2, router_std=router_std, **options)
    assert len(layers_of(sparse)) == 4
    assert_same(logits(sparse), logits(dense))
    assert all(torch.equal(a, b) for a, b in zip(dense.state_dict().values(), before.values(), strict=True))
    assert layers_of(dense) == []


@pytest.mark.parametrize(
    ("model", "config", "values"),
    [
        ("Qwen2ForCausalLM", "Qwen2Config", {}),
        ("GemmaForCausalLM", "GemmaConfig", {"head_dim": 8}),
        ("Phi3ForCausalLM", "Phi3Config", {}),
        ("OPTForCausalLM", "OPTConfig", {"ffn_dim": INNER, "word_embed_proj_dim": HIDDEN, "dropout": 0.0}),
        ("PhiForCausalLM", "PhiConfig", {}),
        ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"hidden_dropout": 0.0}),
        ("NemotronForCausalLM", "NemotronConfig", {}),
        ("Starcoder2ForCausalLM", "Starcoder2Config", {}),
    ],
)
def test_families_of_dense_models(model, config, values):
    made = getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **values}))
    dense = randomised(made)
    assert upcyclable(dense) is (model not in WITHOUT)
    if model in WITHOUT:
        return
    sparse = upcycle(dense, 4, 2)
    assert len(layers_of(sparse)) == 4
    assert_same(logits(sparse), logits(dense))


#: Dense models whose block is no module of its own.
WITHOUT = {"OPTForCausalLM"}


def upcyclable(model: nn.Module) -> bool:
    try:
        upcycle(model, 2, 1)
    except InputError:
        return False
    return True


def mlp(**values: Any) -> nn.Module:
    return llama(**values).model.layers[0].mlp


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_block_by_itself_becomes_a_layer(dtype):
    dense = mlp().to(dtype)
    layer = upcycle(dense, 4, 2)
    x = torch.randn(2, 5, HIDDEN, dtype=dtype)
    assert isinstance(layer, MoELayer)
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    exact = dtype is torch.float64
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-12 if exact else 0.05, atol=1e-12 if exact else 0.02)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("granularity", [1, 2, 6])
def test_tokens_use_whole_copies(granularity, top_k):
    layer = upcycle(mlp(), 5, top_k, granularity=granularity)
    index = layer.route(torch.randn(50, HIDDEN)).index
    copies = (index // granularity).sort(dim=1).values
    assert torch.equal(copies, copies[:, ::granularity].repeat_interleave(granularity, 1))
    assert (copies[:, ::granularity].diff(dim=1) > 0).all()
    parts = (index % granularity).sort(dim=1).values
    assert torch.equal(parts, torch.arange(granularity).repeat_interleave(top_k).expand(50, -1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("granularity", [1, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_number_of_parameters(shared, granularity, bias):
    dense = mlp(mlp_bias=bias)
    layer = upcycle(dense, 5, 2, granularity=granularity, shared=shared)
    held = 3 * HIDDEN * INNER + (2 * INNER + HIDDEN) * bias
    assert sum(p.numel() for p in dense.parameters()) == held
    experts = 5 * (held + (granularity - 1) * HIDDEN * bias)
    router = 5 * granularity * HIDDEN
    assert sum(p.numel() for p in layer.parameters()) == experts + router + held * shared


def test_experts_are_copies_that_share_no_memory():
    dense = mlp()
    layer = upcycle(dense, 4, 2)
    gate_up = torch.cat((dense.gate_proj.weight, dense.up_proj.weight))
    assert torch.equal(layer.experts.gate_up_proj, gate_up.expand(4, -1, -1))
    assert torch.equal(layer.experts.down_proj, dense.down_proj.weight.expand(4, -1, -1))
    with torch.no_grad():
        layer.experts.down_proj[0].zero_()
    assert layer.experts.down_proj[1].abs().sum() > 0
    assert dense.down_proj.weight.abs().sum() > 0


def test_noise_has_the_given_deviation():
    dense = randomised(LlamaForCausalLM(LlamaConfig(**{**SIZES, "intermediate_size": 512}))).model.layers[0].mlp
    plain = upcycle(dense, 3, 2)
    noisy = upcycle(dense, 3, 2, noise=0.1)
    for name in ("gate_up_proj", "down_proj"):
        old, new = plain.experts.get_parameter(name), noisy.experts.get_parameter(name)
        torch.testing.assert_close((new - old).std() / old.std(), torch.tensor(0.1), rtol=0.03, atol=0)
        assert not torch.equal(new[0], new[1])


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_re_initialised_units_have_the_statistics_of_the_old_ones(fraction):
    inner = 512
    dense = randomised(LlamaForCausalLM(LlamaConfig(**{**SIZES, "intermediate_size": inner}))).model.layers[0].mlp
    with torch.no_grad():
        dense.up_proj.weight.mul_(3).add_(1)
        dense.down_proj.weight.sub_(0.5)
    layer = upcycle(dense, 4, 2, reinit_fraction=fraction)
    chosen = []
    for expert in range(4):
        gate, up = layer.experts.gate_up_proj[expert].chunk(2)
        down = layer.experts.down_proj[expert].mT
        old = (dense.gate_proj.weight, dense.up_proj.weight, dense.down_proj.weight.mT)
        changed = [(new != was).any(1) for new, was in zip((gate, up, down), old, strict=True)]
        assert all(torch.equal(changed[0], other) for other in changed)
        assert changed[0].sum() == fraction * inner
        for new, was in zip((gate, up, down), old, strict=True):
            deviation = was[changed[0]].std()
            assert (new[changed[0]].mean() - was[changed[0]].mean()).abs() < 0.05 * deviation
            torch.testing.assert_close(new[changed[0]].std(), deviation, rtol=0.05, atol=0)
            assert torch.equal(new[~changed[0]], was[~changed[0]])
        chosen.append(changed[0])
    assert fraction == 1 or not torch.equal(chosen[0], chosen[1])


def test_router_has_the_given_deviation_and_parts_of_a_copy_the_same_row():
    dense = randomised(LlamaForCausalLM(LlamaConfig(**{**SIZES, "hidden_size": 256}))).model.layers[0].mlp
    weight = upcycle(dense, 16, 2, granularity=2, router_std=0.5).router.weight.detach()
    torch.testing.assert_close(weight.std(), torch.tensor(0.5), rtol=0.05, atol=0)
    assert torch.equal(weight[::2], weight[1::2])
    assert not torch.equal(weight[0], weight[2])


def test_generator_decides_the_random_numbers():
    dense = mlp()
    options = {"noise": 0.1, "reinit_fraction": 0.5}
    made = [
        upcycle(dense, 4, 2, generator=torch.Generator().manual_seed(seed), **options).state_dict()
        for seed in (1, 1, 2)
    ]
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert not torch.equal(made[0]["experts.down_proj"], made[2]["experts.down_proj"])


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        ("all", [0, 1, 2, 3]),
        ("every-other", [1, 3]),
        ([2, 0, 2], [0, 2]),
        (["model.layers.3.mlp", 1], [1, 3]),
    ],
)
def test_layers(layers, chosen):
    dense = llama()
    sparse = upcycle(dense, 4, 2, layers=layers)
    assert [i for i, layer in enumerate(sparse.model.layers) if isinstance(layer.mlp, MoELayer)] == chosen
    assert_same(logits(sparse), logits(dense))


def test_in_place():
    dense = llama()
    want = logits(dense)
    assert upcycle(dense, 4, 2, inplace=True) is dense
    assert len(layers_of(dense)) == 4
    assert_same(logits(dense), want)


def test_copies_and_pickles():
    sparse = upcycle(llama(), 4, 2, layers=[1])
    for same in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
        assert torch.equal(logits(same), logits(sparse))
        assert same.config.to_diff_dict() == sparse.config.to_diff_dict()
        assert (same.config.model_type, same.config.to_diff_dict()["model_type"]) == ("llama", "kpt_upcycled")
    assert llama().config.to_diff_dict()["model_type"] == "llama"


@pytest.mark.parametrize("training", [False, True])
def test_mode_is_kept_and_every_parameter_trained(training):
    sparse = upcycle(llama().train(training), 4, 2, shared=True)
    assert {module.training for module in sparse.modules()} == {training}
    assert all(parameter.requires_grad for parameter in sparse.parameters())


def test_a_block_at_two_places_stays_one():
    dense = llama()
    dense.model.layers[3].mlp = dense.model.layers[0].mlp
    sparse = upcycle(dense, 4, 2)
    assert sparse.model.layers[3].mlp is sparse.model.layers[0].mlp
    assert len(layers_of(sparse)) == 3
    assert_same(logits(sparse), logits(dense))


def test_training_lowers_the_loss_and_parts_the_experts():
    sparse = upcycle(llama(), 4, 2).train()
    optimizer = torch.optim.AdamW(sparse.parameters(), lr=3e-3)
    losses = []
    for _ in range(5):
        loss = sparse(PROMPT, labels=PROMPT).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses == sorted(losses, reverse=True)
    for layer in layers_of(sparse):
        experts = layer.experts.down_proj.detach()
        assert all((experts[i] - experts[j]).abs().max() > 1e-4 for i in range(4) for j in range(i))


def test_capacity_may_be_given():
    layer = upcycle(mlp(), 4, 1, capacity_factor=0.5)
    routing = layer.route(torch.randn(16, HIDDEN))
    assert routing.dropped() > 0
    assert layer.config.capacity_factor == 0.5


def test_blocks_of_sparse_layers_are_left_alone():
    values = {"num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(InputError, match="MixtralForCausalLM has no dense feed-forward block"):
        upcycle(MixtralForCausalLM(MixtralConfig(**SIZES, **values)), 4, 2)
    with pytest.raises(InputError, match="LlamaForCausalLM has no dense feed-forward block"):
        upcycle(upcycle(llama(), 4, 2, shared=True), 4, 2)


class ClippedMLP(type(mlp())):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1, 1)


def test_what_a_block_computes_is_asked_of_it():
    dense = llama()
    dense.model.layers[2].mlp.__class__ = ClippedMLP
    with pytest.raises(InputError, match="ClippedMLP: what it computes is none of"):
        upcycle(dense, 4, 2, inplace=True)
    assert layers_of(dense) == []
    assert len(layers_of(upcycle(dense, 4, 2, layers=[0, 1, 3]))) == 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_experts": 0}, InputError, "num_experts must be a positive integer; got 0"),
        ({"top_k": 5}, InputError, r"top_k \(5\) must not exceed num_experts \(4\)"),
        ({"granularity": 5}, InputError, "granularity must divide the inner width 24 of LlamaMLP; got 5"),
        ({"granularity": 0}, InputError, "granularity must be a positive integer; got 0"),
        ({"noise": -0.1}, InputError, "noise must be at least 0; got -0.1"),
        ({"reinit_fraction": 1.5}, InputError, "reinit_fraction must be at least 0 and at most 1; got 1.5"),
        ({"router_std": float("inf")}, InputError, "router_std must be at least 0; got inf"),
        ({"layers": "some"}, UnknownNameError, "unknown choice of layers 'some'"),
        ({"layers": [4]}, InputError, "layers must be from 0 to 3; got 4"),
        ({"layers": ["model.layers.9.mlp"]}, UnknownNameError, "model.layers.9.mlp"),
        ({"layers": []}, InputError, "chooses none of 4 dense feed-forward blocks"),
        ({"activation": "relu"}, InputError, "activation follows from the dense block"),
        ({"capacity": 2}, UnknownNameError, "unknown field of MoEConfig 'capacity'"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(options, error, message):
    dense = llama()
    with pytest.raises(error, match=message):
        upcycle(dense, **{"num_experts": 4, "top_k": 2, "inplace": True, **options})
    assert layers_of(dense) == []
