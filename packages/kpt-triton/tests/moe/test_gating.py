import math

import pytest
import torch
from calls import top_k_gating
from torch import Tensor

SCORES = ("softmax", "softmax_after", "sigmoid")
#: (experts, top_k, groups, top groups): padded or not, of one expert, of groups padded in both directions.
SIZES = [(8, 2, 1, 1), (1, 1, 1, 1), (7, 7, 1, 1), (12, 3, 4, 2), (12, 5, 3, 2), (8, 3, 8, 4), (20, 4, 5, 5)]


def distinct(tokens: int, experts: int) -> Tensor:
    """Logits of which no two of a token are alike, in any dtype."""
    steps = torch.arange(experts, dtype=torch.float64) - experts // 2
    return steps[torch.rand(tokens, experts).argsort(-1)] / max(1, experts // 8)


def expected(
    logits: Tensor, bias: Tensor | None = None, *, top_k: int, score: str = "softmax", renormalize: bool = True,
    scale: float = 1.0, num_groups: int = 1, top_groups: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """In float64; choices by Python's sort, of equal ones the lower id first. Differentiable in the logits."""
    experts = logits.shape[1]
    scores = {"softmax": lambda: logits.softmax(-1), "softmax_after": lambda: logits, "sigmoid": logits.sigmoid}[
        score
    ]()
    size, index = experts // num_groups, []
    for row in (scores if bias is None else scores + bias.double()).tolist():

        def judged(group: int, row: list[float] = row) -> float:
            best = sorted(row[group * size : (group + 1) * size], reverse=True)
            return sum(best[: 1 if bias is None else 2])

        kept = sorted(range(num_groups), key=lambda group: -judged(group))[:top_groups]
        inside = sorted(expert for expert in range(experts) if expert // size in kept)
        index.append(sorted(inside, key=lambda expert, row=row: -row[expert])[:top_k])
    chosen = torch.tensor(index, dtype=torch.int64).reshape(-1, top_k)
    weights = scores.gather(1, chosen)
    if score == "softmax_after":
        weights = weights.softmax(-1)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, chosen


def check(logits: Tensor, bias: Tensor | None = None, *, atol: float = 1e-6, **settings) -> None:
    """Values, choices and gradient."""
    leaf = logits.detach().requires_grad_()
    weights, index = top_k_gating(leaf, bias, **settings)
    exact = logits.detach().double().cpu().requires_grad_()
    want, chosen = expected(exact, None if bias is None else bias.cpu(), **settings)
    assert (weights.dtype, index.dtype) == (torch.float32, torch.int64)
    assert torch.equal(index.cpu(), chosen)
    torch.testing.assert_close(weights.cpu().double(), want, rtol=1e-6, atol=1e-30)
    pull = torch.randn(weights.shape)
    (grad,) = torch.autograd.grad(weights, leaf, pull.to(weights.device))
    (wanted,) = torch.autograd.grad(want, exact, pull.double())
    assert grad.dtype is logits.dtype
    torch.testing.assert_close(grad.cpu().double(), wanted, rtol=torch.finfo(logits.dtype).eps, atol=atol)


@pytest.mark.parametrize(("experts", "top_k", "num_groups", "top_groups"), SIZES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_is_the_definition(score, renormalize, biased, experts, top_k, num_groups, top_groups, device):
    bias = torch.randint(0, 2, (experts,)).float().to(device) if biased else None
    check(
        distinct(63, experts).float().to(device), bias, top_k=top_k, score=score, renormalize=renormalize, scale=2.5,
        num_groups=num_groups, top_groups=top_groups,
    )  # fmt: skip


MODELS = {
    "qwen3": {"experts": 128, "top_k": 8},
    "gpt-oss": {"experts": 128, "top_k": 4, "score": "softmax_after", "renormalize": False},
    "deepseek-v2": {"experts": 160, "top_k": 6, "renormalize": False, "num_groups": 8, "top_groups": 3},
    "deepseek-v3": {"experts": 256, "top_k": 8, "score": "sigmoid", "num_groups": 8, "top_groups": 4, "scale": 2.5},
    "kimi-k2": {"experts": 384, "top_k": 8, "score": "sigmoid"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", MODELS)
def test_real_models(model, dtype, device):
    settings = dict(MODELS[model])
    experts = settings.pop("experts")
    bias = torch.randint(0, 2, (experts,)).float().to(device) if settings.get("score") == "sigmoid" else None
    check(distinct(9, experts).to(device, dtype), bias, **settings)


def test_as_many_experts_as_it_takes(device):
    check(distinct(2, 1024).float().to(device), top_k=16)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens, device):
    check(distinct(tokens, 8).float().to(device), top_k=2)


def test_of_equal_scores_the_lower_id_comes_first(device):
    logits = torch.tensor([[0.0, -0.0, 1.0, 1.0, 0.0], [2.0] * 5], device=device)
    weights, index = top_k_gating(logits, top_k=4, score="softmax_after", renormalize=False)
    assert index.tolist() == [[2, 3, 0, 1], [0, 1, 2, 3]]
    assert weights[1].tolist() == [0.25] * 4


def test_of_equal_groups_the_lower_comes_first(device):
    _, index = top_k_gating(torch.zeros(3, 12, device=device), top_k=3, num_groups=4, top_groups=2)
    assert index.tolist() == [[0, 1, 2]] * 3


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_nan_and_infinity_are_chosen_as_by_topk_and_never_leave_the_experts(score, biased, groups, device):
    logits = distinct(5, 12).float().to(device)
    logits[1, 7] = float("nan")
    logits[2, 3] = -float("nan")
    logits[3] = float("-inf")
    logits[4, :11] = float("-inf")
    bias = torch.zeros(12, device=device) if biased else None
    weights, index = top_k_gating(
        logits, bias, top_k=3, score=score, renormalize=False, num_groups=groups[0], top_groups=groups[1]
    )
    assert ((index >= 0) & (index < 12)).all()
    assert all(len(set(row)) == 3 for row in index.tolist())
    assert weights[0].isfinite().all()
    assert weights[1:3, 0].isnan().all()
    if score != "softmax":
        assert index[1:3, 0].tolist() == [7, 3]
    if not biased or groups == (1, 1):
        assert index[4, 0] == 11, "of groups with two scores of -inf none is best"


def test_scores_that_all_underflow_give_no_weights(device):
    logits = torch.full((4, 8), -120.0, device=device, requires_grad=True)
    weights, _ = top_k_gating(logits, top_k=2, score="sigmoid")
    assert torch.equal(weights, torch.zeros_like(weights))
    weights.sum().backward()
    assert logits.grad.isfinite().all()


def test_layouts_do_not_matter(device):
    logits, bias = distinct(9, 12).float().to(device), torch.arange(12.0, device=device)
    want = top_k_gating(logits, bias, top_k=3)
    wide = torch.full((9, 30), float("nan"), device=device)
    wide[:, 5:17] = logits
    transposed = logits.t().contiguous().t()
    spread = torch.stack((bias, bias), -1)[:, 0]
    for x, b in ((wide[:, 5:17], bias), (transposed, bias), (logits, spread)):
        leaf = x.detach().requires_grad_()
        got = top_k_gating(leaf, b, top_k=3)
        assert all(torch.equal(a, c) for a, c in zip(got, want, strict=True))
        # Of a sum, the gradient that comes from behind has strides of zero.
        (grad,) = torch.autograd.grad((got[0] * torch.ones_like(got[0])).sum(), leaf)
        (plain,) = torch.autograd.grad(top_k_gating(leaf, b, top_k=3)[0].sum(), leaf)
        assert torch.equal(grad, plain)


def test_repeats_bitwise(device):
    logits = distinct(40, 20).float().to(device)
    first = top_k_gating(logits, top_k=4)
    assert all(torch.equal(a, b) for a, b in zip(top_k_gating(logits, top_k=4), first, strict=True))


def test_logits_far_apart_keep_their_digits(device):
    # Base 2 is the hardware's: a naive change of base is off by some units in the last place at -60.
    logits = torch.tensor([[0.0, -60.0, -30.0, -10.0]], device=device)
    weights, _ = top_k_gating(logits, top_k=4, renormalize=False)
    want = [math.exp(value) / sum(math.exp(x) for x in (0, -10, -30, -60)) for value in (0, -10, -30, -60)]
    assert weights[0].tolist() == pytest.approx(want, rel=4e-7)
