"""`moe.experts` with 8-bit weights: the op of the dequantised weights, whose matrices are frozen."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kpt_core import InputError
from kpt_moe.experts import experts
from kpt_moe.experts import experts as op
from oracle import CLAMPED, Inputs, gradients, make_inputs, naive_experts

kpt_fp8 = pytest.importorskip("kpt_fp8")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GPT_OSS = {**CLAMPED, "limit": 7.0, "interleaved": True, "transposed": True}
CHOICES = {
    "default": {},
    "plain activation": {"activation": "gelu"},
    "transposed": {"transposed": True},
    "gpt-oss": GPT_OSS,
}


def quantised(weight: Tensor, scheme: str, transposed: bool, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    made = kpt_fp8.quantize_to_fp8(weight.mT if transposed else weight, dtype, scheme)
    if not transposed:
        return made.codes, made.scale
    return made.codes.mT.contiguous(), made.scale.mT.contiguous() if scheme == "128x128" else made.scale


def dequantised(codes: Tensor, scale: Tensor, transposed: bool) -> Tensor:
    """In float64, each number times the scale of its channel or block."""
    if scale.dim() == 2:
        return codes.double() * scale.double().unsqueeze(1 if transposed else 2)
    blocks = scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    return codes.double() * blocks[:, : codes.shape[1], : codes.shape[2]]


def case(
    choices: dict, scheme: str = "row", dtype: torch.dtype = torch.float64, codes: torch.dtype = E4M3, **sizes
) -> tuple[Inputs, dict]:
    """Inputs with dequantised float64 matrices, and the keywords that call the op with the quantised ones."""
    transposed = choices.get("transposed", False)
    activation = choices.get("activation", "swiglu")
    inputs = make_inputs(activation=activation, transposed=transposed, bias=True, sentinels=True, dtype=dtype, **sizes)
    (up, up_scale), (down, down_scale) = (
        quantised(weight, scheme, transposed, codes) for weight in (inputs.up, inputs.down)
    )
    wide = {
        "up": dequantised(up, up_scale, transposed),
        "down": dequantised(down, down_scale, transposed),
    }
    call = {"gate_up_proj": up, "down_proj": down, "gate_up_scale": up_scale, "down_scale": down_scale, **choices}
    return replace(inputs, **wide), call


def run(inputs: Inputs, call: dict) -> Tensor:
    return op(
        inputs.x,
        inputs.index,
        inputs.weights,
        gate_up_proj_bias=inputs.up_bias,
        down_proj_bias=inputs.down_bias,
        **call,
    )


def kept(grads: list[Tensor]) -> list[Tensor]:
    """Without the matrices' own."""
    return [*grads[:2], *grads[4:]]


def both(inputs: Inputs, call: dict, choices: dict) -> tuple[list[Tensor], list[Tensor]]:
    """(value, gradients) of the op and of the definition in float64."""
    grad = torch.randn(inputs.x.shape).to(inputs.x.dtype)
    have, have_grads = gradients(lambda i: run(i, call), inputs, grad)
    want, want_grads = gradients(lambda i: naive_experts(i, **choices), inputs.to(torch.float64), grad.double())
    return [have, *kept(have_grads)], [want, *kept(want_grads)]


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("codes", [E4M3, E5M2])
@pytest.mark.parametrize("scheme", ["row", "128x128"])
@pytest.mark.parametrize("choice", CHOICES)
def test_value_and_gradients_are_those_of_the_dequantised_weights(choice, scheme, codes):
    choices = CHOICES[choice]
    inputs, call = case(choices, scheme, codes=codes, hidden=136, inner=66)
    for have, want in zip(*both(inputs, call, choices), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("choice", ["default", "gpt-oss"])
def test_error_is_that_of_rounding(choice, dtype):
    choices = CHOICES[choice]
    inputs, call = case(choices, "128x128", dtype, tokens=40, hidden=136, inner=64)
    # As for weights that are not quantised, and one rounding more for each matrix.
    for have, want in zip(*both(inputs, call, choices), strict=True):
        assert have.dtype is dtype
        assert (have.double() - want).norm() <= 10 * torch.finfo(dtype).eps * want.norm()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_one_projection_may_be_quantised_and_the_other_trained(name):
    inputs, call = case({})
    other, field, place = ("down", "down", 3) if name == "gate_up" else ("gate_up", "up", 2)
    del call[f"{other}_scale"], call[f"{other}_proj"]
    grad = torch.randn_like(inputs.x)
    have, have_grads = gradients(lambda i: run(i, {**call, f"{other}_proj": getattr(i, field)}), inputs, grad)
    want, want_grads = gradients(naive_experts, inputs, grad)
    torch.testing.assert_close(have, want)
    for index, (got, expected) in enumerate(zip(have_grads, want_grads, strict=True)):
        if index in (2, 3) and index != place:
            assert not got.any()
        else:
            torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("tokens", [0, 1, 63])
def test_numbers_of_tokens(tokens):
    inputs, call = case({}, tokens=tokens)
    torch.testing.assert_close(run(inputs, call), naive_experts(inputs))


def test_what_is_saved_for_backward_is_no_larger_than_without_quantisation():
    inputs, call = case({}, dtype=torch.float32, tokens=16, hidden=64, inner=48)
    plain = replace(inputs, up=inputs.up.float(), down=inputs.down.float())

    def saved(function) -> int:
        sizes = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function()
        return sum(sizes.values())

    x = inputs.x.requires_grad_()
    quantised_bytes = saved(lambda: run(replace(inputs, x=x), call))
    plain_bytes = saved(lambda: experts(*replace(plain, x=x).args))
    weights = plain.up.nbytes + plain.down.nbytes
    scales = call["gate_up_scale"].nbytes + call["down_scale"].nbytes
    assert quantised_bytes == plain_bytes - weights + weights // 4 + scales


@pytest.mark.usefixtures("path")
def test_compiled_in_one_graph_gives_the_same():
    inputs, call = case(GPT_OSS, dtype=torch.float32)
    x = inputs.x.requires_grad_()

    def step(x: Tensor) -> Tensor:
        return run(replace(inputs, x=x), call)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for have, want in zip(*((out := f(x), *torch.autograd.grad(out.sum(), x)) for f in (compiled, step)), strict=True):
        torch.testing.assert_close(have, want)


INPUTS, CALL = case({}, dtype=torch.float32)
WRONG = {
    "no scale": ({"gate_up_scale": None}, r"gate_up_proj must have x's dtype .* unless gate_up_scale is given; got"),
    "a scale of plain weights": (
        {"down_proj": CALL["down_proj"].float()},
        r"down_proj must be float8_e4m3fn or float8_e5m2 where down_scale is given; got torch.float32: quantise it",
    ),
    "scales of other channels": (
        {"gate_up_scale": CALL["gate_up_scale"][:, 1:]},
        r"gate_up_scale must be float32 or float64 of shape \[5, 12\] or \[5, 1, 1\].*got torch.float32 \[5, 11\]",
    ),
    "scales of bfloat16": ({"down_scale": CALL["down_scale"].bfloat16()}, r"down_scale must be float32.*bfloat16"),
    "scales that are no tensor": ({"down_scale": 0.5}, r"down_scale must be a tensor; got float"),
    "scales elsewhere": ({"down_scale": CALL["down_scale"].to("meta")}, r"x is on cpu, but down_proj on cpu and down"),
    "weights to train": (
        {"down_proj": CALL["down_proj"].clone().requires_grad_()},
        r"down_proj is quantised .*got requires_grad=True: call requires_grad_\(False\)",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused(wrong):
    change, message = WRONG[wrong]
    with pytest.raises(InputError, match=r"moe\.experts: " + message):
        run(INPUTS, {**CALL, **change})


def test_size_key_tells_quantised_calls_apart():
    plain = replace(INPUTS, up=INPUTS.up.float(), down=INPUTS.down.float())
    without = op.size_key(op.bind(*plain.args))
    key = op.size_key(op.bind(INPUTS.x, INPUTS.index, INPUTS.weights, **CALL))
    assert key == (*without[:-1], f"{without[-1]} float8")


@pytest.mark.parametrize("path", ["grouped"], indirect=True)
def test_explain_names_the_scaled_products(path):
    selection = op.explain(INPUTS.x, INPUTS.index, INPUTS.weights, **CALL)
    assert [child.op for child in selection.children] == ["moe.scaled_grouped_mm"] * 2
