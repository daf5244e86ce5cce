"""Transforms of torch.func, forward mode and second derivatives: of every op, and through a whole tiny model."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from families import FAMILIES, experts_of
from kpt_core import record
from kpt_moe import MoEConfig, MoELayer
from kpt_moe.experts import experts
from kpt_moe.grouped_mm import grouped_mm, grouped_mm_wgrad
from kpt_moe.scaled_grouped_mm import scaled_grouped_mm
from kpt_moe.top_k_gating import top_k_gating
from kpt_moe.transformers import NAME
from oracle import CLAMPED, make_inputs, naive_experts

#: torch 2.13: its own forward mode compiles a decomposition in the old way.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

Function = Callable[[Tensor], Tensor]
OFFSETS = torch.tensor([2, 2, 7], dtype=torch.int32)
INPUTS = make_inputs(tokens=9, bias=True, sentinels=True)
GPT_OSS = {**CLAMPED, "limit": 7.0, "interleaved": True, "transposed": True}
OTHERS = make_inputs(tokens=9, bias=True, transposed=True)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def sorted_products(x: Tensor, weight: Tensor) -> Tensor:
    """`moe.grouped_mm` of three experts, row by row."""
    owners = [0, 0, 2, 2, 2, 2, 2]
    rows = [x[row] @ weight[expert] for row, expert in enumerate(owners)]
    return torch.stack([*rows, *[torch.zeros_like(rows[0])] * (x.shape[0] - len(owners))])


WEIGHT = normal(3, 8, 5)
CODES, SCALE = (normal(3, 8, 5) * 30).to(torch.float8_e4m3fn), normal(3, 5).abs()
GRAD = normal(9, 5)
EARLY = torch.arange(9).unsqueeze(1) < 2
LATE = (torch.arange(9).unsqueeze(1) >= 2) & (torch.arange(9).unsqueeze(1) < 7)

#: Of each op the function of an `x` `[9, 8]`, and the same by torch alone.
OPS: dict[str, tuple[Function, Function]] = {
    "experts": (lambda x: experts(x, *INPUTS.args[1:]), lambda x: naive(x, INPUTS)),
    "experts, gpt-oss": (
        lambda x: experts(x, *OTHERS.args[1:], **GPT_OSS),
        lambda x: naive(x, OTHERS, **GPT_OSS),
    ),
    "grouped_mm": (lambda x: grouped_mm(x, WEIGHT, OFFSETS), lambda x: sorted_products(x, WEIGHT)),
    "grouped_mm_wgrad": (
        lambda x: grouped_mm_wgrad(x * x, GRAD, OFFSETS),
        lambda x: torch.stack([(x * x * own).t() @ GRAD for own in (EARLY, EARLY & LATE, LATE)]),
    ),
    "scaled_grouped_mm": (
        lambda x: scaled_grouped_mm(x * x, CODES, SCALE, OFFSETS),
        lambda x: sorted_products(x * x, CODES.double() * SCALE.unsqueeze(1)),
    ),
    "top_k_gating": (
        lambda x: top_k_gating(x, top_k=3)[0],
        lambda x: (top := x.softmax(-1).topk(3).values) / top.sum(-1, keepdim=True),
    ),
}


def naive(x: Tensor, inputs, **choices) -> Tensor:
    return naive_experts(type(inputs)(x, *inputs.args[1:]), **choices)


def loss(function: Function) -> Function:
    return lambda x: function(x).square().sum()


def forward_mode(function: Function, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        out = function(torch.autograd.forward_ad.make_dual(x, x.sin()))
        return torch.autograd.forward_ad.unpack_dual(out).tangent


def by_autograd(function: Function, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


TRANSFORMS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "vmap": lambda f, x: vmap(f)(torch.stack((x, x.sin()))),
    "vmap in training": lambda f, x: vmap(f)(torch.stack((x, x.sin())).requires_grad_()),
    "grad": lambda f, x: grad(loss(f))(x),
    "per-sample gradients": lambda f, x: vmap(grad(loss(f)))(torch.stack((x, x.sin()))),
    "jvp": lambda f, x: jvp(f, (x,), (x.sin(),))[1],
    "jacrev": lambda f, x: jacrev(f)(x),
    "forward mode": forward_mode,
    "gradient of a gradient": lambda f, x: grad(lambda x: grad(loss(f))(x).square().sum())(x),
    "double backward": by_autograd,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", OPS)
def test_equals_torch_alone(op, transform):
    ours, plain = OPS[op]
    x = normal(9, 8)
    have = TRANSFORMS[transform](ours, x)
    want = TRANSFORMS[transform](plain, x)
    assert have.abs().max() > 0
    torch.testing.assert_close(have, want)


def test_samples_may_have_routings_of_their_own():
    samples = [make_inputs(tokens=9, bias=True, sentinels=True, seed=seed) for seed in (0, 1)]
    tensors = [torch.stack(pair) for pair in zip(*(s.args[:3] for s in samples), strict=True)]

    def of_sample(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return experts(x, index, weights, *INPUTS.args[3:]).square().sum()

    have = vmap(grad(of_sample, argnums=(0, 2)), in_dims=(0, 0, 0))(*tensors)
    for number, s in enumerate(samples):
        x, weights = s.x.clone().requires_grad_(), s.weights.clone().requires_grad_()
        of_sample(x, s.index, weights).backward()
        torch.testing.assert_close((have[0][number], have[1][number]), (x.grad, weights.grad))


def test_samples_may_have_groups_of_their_own():
    xs, offsets = normal(2, 9, 8), torch.stack((OFFSETS, torch.tensor([0, 4, 9], dtype=torch.int32)))
    for function in (
        lambda x, ends: grouped_mm(x, WEIGHT, ends),
        lambda x, ends: grouped_mm_wgrad(x, GRAD, ends),
        lambda x, ends: scaled_grouped_mm(x, CODES, SCALE, ends),
    ):
        want = torch.stack([function(x, ends) for x, ends in zip(xs, offsets, strict=True)])
        torch.testing.assert_close(vmap(function)(xs, offsets), want)


LAYER_TRANSFORMS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    name: TRANSFORMS[name] for name in ("per-sample gradients", "jvp", "forward mode", "double backward")
}


@pytest.mark.parametrize("transform", LAYER_TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_in_training(dtype, transform):
    layer = MoELayer(MoEConfig(hidden_size=8, num_experts=4, top_k=4, intermediate_size=6)).to(dtype)
    exact = copy.deepcopy(layer).double()
    x = normal(9, 8).to(dtype)
    have, want = (LAYER_TRANSFORMS[transform](made, x.to(made.router.weight.dtype)) for made in (layer, exact))
    # Some ten roundings on the way.
    assert (have.double() - want).norm() <= 10 * torch.finfo(dtype).eps * want.norm()


@pytest.fixture(scope="module", params=["mixtral", "gpt_oss"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model in float64; its attention is written out, since torch's own has no second derivative."""
    built = FAMILIES[request.param].build().double()
    built.set_attn_implementation("eager")
    return built


Parameters = dict[str, Tensor]


def loss_of(model: PreTrainedModel, implementation: str) -> Callable[[Parameters, Tensor], Tensor]:
    """The loss of embedded tokens `[tokens, hidden_size]` as a function of the parameters."""
    model.set_experts_implementation(implementation)

    def loss(parameters: Parameters, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0]).unsqueeze(0)
        given = {"inputs_embeds": x.unsqueeze(0), "position_ids": positions, "use_cache": False}
        return functional_call(model, parameters, (), given).logits.square().mean()

    return loss


def parameters_of(model: PreTrainedModel) -> Parameters:
    """Those that a loss of embedded tokens depends on."""
    unused = {"model.embed_tokens.weight"}
    return {name: p.detach().clone() for name, p in model.named_parameters() if name not in unused}


def assert_equal(have: object, want: object) -> None:
    """Equal but for what the norms of these models round: they compute in float32 whatever the model is in."""
    for ours, theirs in zip(tree_leaves(have), tree_leaves(want), strict=True):
        assert theirs.abs().max() > 0
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


MODEL_TRANSFORMS: dict[str, Callable] = {
    "grad": lambda loss, parameters, x: grad(loss)(parameters, x),
    "jvp": lambda loss, parameters, x: jvp(lambda p: loss(p, x), (parameters,), (parameters,)),
    "gradient of a gradient": lambda loss, parameters, x: grad(lambda p: grad(lambda x: loss(p, x))(x).square().sum())(
        parameters
    ),
}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("transform", MODEL_TRANSFORMS)
def test_model_equals_eager(model, transform):
    parameters, x = parameters_of(model), normal(7, 32)
    have, want = (
        MODEL_TRANSFORMS[transform](loss_of(model, implementation), parameters, x) for implementation in (NAME, "eager")
    )
    assert_equal(have, want)


@pytest.mark.usefixtures("quiet")
def test_gradients_of_samples_equal_eager(model):
    # transformers' eager experts read numbers, which vmap does not allow: their samples are taken one by one.
    parameters, xs = parameters_of(model), normal(3, 7, 32)
    have = vmap(grad(loss_of(model, NAME)), in_dims=(None, 0))(parameters, xs)
    eager = grad(loss_of(model, "eager"))
    want = [eager(parameters, x) for x in xs]
    assert_equal(have, {name: torch.stack([each[name] for each in want]) for name in have})


@pytest.mark.usefixtures("quiet")
def test_double_backward_through_a_model(model):
    x, grads = normal(7, 32).requires_grad_(), []
    wanted = [p for module in experts_of(model) for p in module.parameters()]
    for implementation in (NAME, "eager"):
        model.set_experts_implementation(implementation)
        value = model(inputs_embeds=x.unsqueeze(0), use_cache=False).logits.square().mean()
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        grads.append(torch.autograd.grad(first.square().sum(), wanted))
    assert_equal(*grads)


def test_experts_compute_their_own_rows_alone_but_under_vmap() -> None:
    x = INPUTS.args[0]
    with record() as ran:
        jvp(lambda x: experts(x, *INPUTS.args[1:]), (x,), (x,))
        vmap(lambda x: experts(x, *INPUTS.args[1:]))(torch.stack((x, x)))
    assert [each.kernel.rpartition(".")[2] for each in ran] == ["experts_plain:forward", "reference"]
