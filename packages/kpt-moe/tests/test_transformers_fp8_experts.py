"""`experts_implementation="kpt"` on transformers' FP8 experts: the numbers are those of the dequantised weights."""

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kpt_core import InputError, record
from kpt_moe.transformers import NAME, known_activation

fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
if not hasattr(fp8, "ALL_FP8_EXPERTS_FUNCTIONS"):
    pytest.skip("this transformers has no registry of FP8 experts", allow_module_level=True)

from transformers.integrations.moe import use_experts_implementation  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet")

EXPERTS, HIDDEN, TOP_K = 5, 192, 2
BLOCK = [128, 128]
E4M3 = torch.float8_e4m3fn


def quantised(shape: tuple[int, ...], block: list[int] | None, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Codes of normal numbers and their scales, one for each block, or one for all."""
    codes = torch.randn(shape).mul(100).clamp(-448, 448).to(E4M3)
    blocks = (1, 1) if block is None else [-(-size // part) for size, part in zip(shape, block, strict=True)]
    scale = torch.rand(*blocks).add(0.5) * 0.01 / shape[1] ** 0.5
    return codes, scale.log2().round().exp2() if ue8m0 else scale


def widened(codes: Tensor, scale: Tensor, block: list[int] | None) -> Tensor:
    """In float64, as a checkpoint says: each number times the scale of its block."""
    if block is None:
        return codes.double() * scale.double()
    scale = scale.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return codes.double() * scale[: codes.shape[0], : codes.shape[1]]


def build(
    inner: int = 128,
    *,
    block: list[int] | None = BLOCK,
    gated: bool = True,
    ue8m0: bool = False,
    scheme: str = "dynamic",
    **own: Any,
) -> tuple[Any, list[Tensor], list[Tensor]]:
    """FP8 experts as transformers builds them, filled expert by expert from a checkpoint; their matrices in float64."""
    values = {"hidden_act": "silu", "_experts_implementation": NAME, **own}
    config = SimpleNamespace(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=inner, **values)
    kind = type("FP8Experts", (fp8.FP8Experts,), {})
    kind = use_experts_implementation(kind, experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS, has_gate=gated)
    torch.manual_seed(0)
    module = kind(
        config, block_size=block, activation_scheme=scheme, scale_fmt="ue8m0" if ue8m0 else "float", has_gate=gated
    )
    name = "gate_up_proj" if gated else "up_proj"
    ups, downs = [], []
    state: dict[str, list[Tensor]] = {}
    for _ in range(EXPERTS):
        parts = [quantised((inner, HIDDEN), block, ue8m0) for _ in range(2 if gated else 1)]
        down = quantised((HIDDEN, inner), block, ue8m0)
        ups.append(torch.cat([widened(*part, block) for part in parts]))
        downs.append(widened(*down, block))
        tensors = [torch.cat([part[i] for part in parts]) for i in range(2)]
        for key, value in zip(
            (name, f"{name}_scale_inv", "down_proj", "down_proj_scale_inv"), (*tensors, *down), strict=True
        ):
            state.setdefault(key, []).append(value)
    for key, tensors in state.items():
        whole = torch.stack(tensors).to(getattr(module, key).dtype)
        setattr(module, key, nn.Parameter(whole))  # as transformers leaves it: requires_grad=True
    return module, ups, downs


def routed(tokens: int = 13, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)])
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    return x, index, torch.rand(tokens, TOP_K, generator=generator).to(dtype)


def in_float64(
    module: Any, ups: list[Tensor], downs: list[Tensor], x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """The definition, by the dequantised matrices."""
    act = module._apply_gate if module.has_gate else module.act_fn
    rows = []
    for token, row in enumerate(x.double()):
        chosen = zip(index[token].tolist(), weights[token].double(), strict=True)
        rows.append(sum(w * (downs[e] @ act((ups[e] @ row).unsqueeze(0))[0]) for e, w in chosen if 0 <= e < EXPERTS))
    return torch.stack([row if isinstance(row, Tensor) else torch.zeros(HIDDEN).double() for row in rows])


def relative(have: Tensor, want: Tensor) -> float:
    return ((have.double() - want).norm() / want.norm()).item()


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "blocks": ({}, "moe.experts"),
    "power-of-two scales": ({"ue8m0": True}, "moe.experts"),
    "blocks that are cut off": ({"inner": 96}, "moe.scaled_grouped_mm"),
    "more blocks than transformers counts": ({"inner": 192}, "moe.scaled_grouped_mm"),
    "a scale for each matrix": ({"block": None, "inner": 96}, "moe.experts"),
    "static activation scales": ({"block": None, "scheme": "static"}, "moe.experts"),
    "no gate": ({"gated": False, "inner": 96}, "moe.experts"),
    "no gate, a scale for each matrix": ({"gated": False, "block": None}, "moe.experts"),
    "a limit": ({"swiglu_limit": 0.5}, "moe.experts"),
    "clamped and shifted": ({"swiglu_limit": 0.5, "swiglu_alpha": 1.702}, "moe.experts"),
    "a gating of its own": ({"mlp_gate_softcap": 4.0, "mlp_up_softcap": 25.0}, "moe.scaled_grouped_mm"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_is_the_product_of_the_dequantised_weights(kind):
    choices, op = KINDS[kind]
    module, ups, downs = build(**choices)
    args = routed()
    with record() as log:
        have = module(*args)
    assert {selection.op for selection in log} == {op}
    assert have.dtype is torch.float32
    assert relative(have, in_float64(module, ups, downs, *args)) < 1e-6


@pytest.mark.parametrize("kind", ["blocks", "blocks that are cut off"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_that_of_rounding_and_activations_are_not_quantised(kind, dtype):
    module, ups, downs = build(**KINDS[kind][0])
    args = routed(64, dtype)
    want = in_float64(module, ups, downs, *args)
    error = relative(module(*args), want)
    assert error < 2 * torch.finfo(dtype).eps

    def eight_bits(rows: Tensor) -> Tensor:
        """What transformers' own kernels make of activations: 8-bit numbers, a scale for each 128."""
        groups = nn.functional.pad(rows, (0, -rows.shape[1] % 128)).unflatten(1, (-1, 128))
        scale = groups.abs().amax(2, keepdim=True) / 448
        return (groups / scale).to(E4M3).double().mul(scale).flatten(1)[:, : rows.shape[1]]

    rounded = copy.copy(module)
    rounded._apply_gate = lambda h: eight_bits(module._apply_gate(h))
    theirs = in_float64(rounded, ups, downs, eight_bits(args[0].double()), *args[1:])
    assert error < relative(theirs, want) / 3


@pytest.mark.parametrize("kind", ["blocks", "blocks that are cut off", "a scale for each matrix"])
def test_gradients_reach_the_tokens_and_the_routing_alone(kind):
    module, ups, downs = build(**KINDS[kind][0])
    x, index, weights = routed()
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    grad = torch.randn(x.shape)
    have = torch.autograd.grad(module(x, index, weights), leaves, grad)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = torch.autograd.grad(in_float64(module, ups, downs, wide[0], index, wide[1]), wide, grad.double())
    for a, b in zip(have, want, strict=True):
        assert relative(a, b) < 1e-5
    module(x, index, weights).sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("kind", ["blocks", "blocks that are cut off"])
def test_pairs_of_other_ranks_contribute_nothing(kind):
    module, ups, downs = build(**KINDS[kind][0])
    module._is_expert_parallel = True
    x, index, weights = routed()
    index[::2, 0] = EXPERTS
    index[4] = EXPERTS
    assert relative(module(x, index, weights), in_float64(module, ups, downs, x, index, weights)) < 1e-6


@pytest.mark.parametrize(
    "kind", ["blocks", "power-of-two scales", "blocks that are cut off", "a scale for each matrix"]
)
def test_compiled_in_one_graph_gives_the_same(kind):
    module, *_ = build(**KINDS[kind][0])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for tokens in (7, 8):
        x, index, weights = routed(tokens)
        results = [
            (out.detach(), *torch.autograd.grad(out.sin().sum(), x))
            for call in (compiled, module)
            for out in [call(x.requires_grad_(), index, weights)]
        ]
        torch.testing.assert_close(*results)


def test_under_autocast():
    module, ups, downs = build()
    args = routed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        have = module(*args)
    assert have.dtype is torch.float32
    assert relative(have, in_float64(module, ups, downs, *args)) < 0.02


def test_what_was_dequantised_runs_as_any_experts():
    module, ups, downs = build()
    module.gate_up_proj, module.down_proj = nn.Parameter(torch.stack(ups)), nn.Parameter(torch.stack(downs))
    module.gate_up_proj_scale_inv = module.down_proj_scale_inv = None
    args = routed(dtype=torch.float64)
    assert relative(module(*args), in_float64(module, ups, downs, *args)) < 1e-12


def test_running_leaves_no_trace_in_the_module():
    module, *_ = build()
    before = {name: (value.dtype, value.data_ptr()) for name, value in module.named_parameters()}
    keys = vars(module).keys() | {"training"}
    module(*routed())
    assert known_activation(module) is not None
    assert {name: (value.dtype, value.data_ptr()) for name, value in module.named_parameters()} == before
    assert vars(module).keys() == keys
    assert b"kpt_moe" not in pickle.dumps(vars(module)["config"]) + pickle.dumps(list(module.parameters()))


def four_bits(module: Any) -> None:
    module.gate_up_proj = nn.Parameter(torch.zeros(EXPERTS, 256, HIDDEN // 2, dtype=torch.int8), requires_grad=False)


def other_blocks(module: Any) -> None:
    module.block_size = [1, 32]


def lost_scales(module: Any) -> None:
    module.gate_up_proj_scale_inv = nn.Parameter(module.gate_up_proj_scale_inv[:, :1])


WRONG = {
    "four bits": (four_bits, r"gate_up_proj .* float8_e4m3fn or float8_e5m2; got torch.int8.*dequantize=True"),
    "other blocks": (other_blocks, r"blocks of \[128, 128\].*got .*weight_block_size=\[1, 32\].*dequantize=True"),
    "lost scales": (lost_scales, r"gate_up_proj_scale_inv must be \[5, 2, 2\].*got \[5, 1, 2\]"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_served_is_refused_in_a_sentence(wrong):
    change, message = WRONG[wrong]
    module, *_ = build()
    change(module)
    with pytest.raises(InputError, match=message):
        module(*routed())
