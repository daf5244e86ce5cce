"""Every wrong argument of `moe.experts` is refused with the offending value and what was expected."""

import pytest
import torch

from kpt_core import InputError, KptError, UnknownNameError
from kpt_moe.experts import experts
from oracle import ACTIVATIONS, GATED, Inputs, make_inputs

GOOD = make_inputs(bias=True)


def replaced(**changes) -> tuple:
    return Inputs(**{**vars(GOOD), **changes}).args


WRONG = {
    "x of three dimensions": (
        {"x": GOOD.x[None]},
        r"x must be floating \[tokens, hidden_size\], .*; got .* \[1, 11, 8\]",
    ),
    "x of integers": ({"x": GOOD.x.long()}, r"x must be floating .*; got torch.int64 \[11, 8\]"),
    "index of nothing": ({"index": None}, "top_k_index must be a tensor; got NoneType"),
    "bias of numbers": ({"up_bias": [0.0]}, "gate_up_proj_bias must be a tensor; got list"),
    "x in a list": ({"x": [GOOD.x]}, "x must be a tensor; got list"),
    "x of float8": (
        {"x": GOOD.x.to(torch.float8_e4m3fn)},
        r"of float64, float32, bfloat16 or float16; got torch.float8_e4m3fn \[11, 8\]",
    ),
    "weights of float8": (
        {"weights": GOOD.weights.to(torch.float8_e4m3fn)},
        r"top_k_weights floating, of float64, .*; got torch.int64 and torch.float8_e4m3fn",
    ),
    "index of another length": (
        {"index": GOOD.index[:7]},
        r"must both be \[11, top_k\]; got \[7, 3\] and \[11, 3\]",
    ),
    "weights of another length": (
        {"weights": GOOD.weights[:, :2]},
        r"must both be \[11, top_k\]; got \[11, 3\] and \[11, 2\]",
    ),
    "index of one dimension": (
        {"index": GOOD.index[:, 0], "weights": GOOD.weights[:, 0]},
        r"must both be \[11, top_k\]; got \[11\] and \[11\]",
    ),
    "index of floats": (
        {"index": GOOD.index.double()},
        r"top_k_index must be int64 or int32 and top_k_weights floating, .*; got torch.float64 and torch.float64",
    ),
    "index of int16": ({"index": GOOD.index.short()}, r"must be int64 or int32 .*; got torch.int16"),
    "weights of integers": (
        {"weights": GOOD.weights.long()},
        r"top_k_weights floating, .*; got torch.int64 and torch.int64",
    ),
    "matrix of one expert": (
        {"up": GOOD.up[0]},
        r"must have three dimensions, the experts first; got \[12, 8\] and \[5, 8, 6\]",
    ),
    "hidden size differs": (
        {"up": GOOD.up[:, :, :7]},
        r"hidden_size 8, .*gate_up_proj \[5, 12, 7\] asks for itself as \[5, 12, 8\]",
    ),
    "number of experts differs": (
        {"down": GOOD.down[:4]},
        r"asks .* for down_proj as \[5, 8, 6\]; got down_proj \[4, 8, 6\]",
    ),
    "inner size differs": ({"down": GOOD.down[:, :, :5]}, r"for down_proj as \[5, 8, 6\]; got down_proj \[5, 8, 5\]"),
    "odd width of a gated activation": (
        {"up": GOOD.up[:, :11], "down": GOOD.down[:, :, :5], "up_bias": None},
        r"activation 'swiglu' and transposed=False, gate_up_proj \[5, 11, 8\]",
    ),
    "bias of another width": (
        {"up_bias": GOOD.up_bias[:, :6]},
        r"gate_up_proj_bias must be \[5, 12\]; got \[5, 6\]",
    ),
    "bias of one expert": ({"down_bias": GOOD.down_bias[0]}, r"down_proj_bias must be \[5, 8\]; got \[8\]"),
    **{
        f"{name} of another dtype": (
            {field: getattr(GOOD, field).float()},
            rf"{name} must have x's dtype and device \(torch.float64 on cpu\); got torch.float32 on cpu: convert",
        )
        for field, name in (
            ("up", "gate_up_proj"),
            ("down", "down_proj"),
            ("up_bias", "gate_up_proj_bias"),
            ("down_bias", "down_proj_bias"),
        )
    },
    "parameters on another device": (
        {"up": GOOD.up.to("meta")},
        r"gate_up_proj must have x's dtype and device \(torch.float64 on cpu\); got torch.float64 on meta",
    ),
    "index on another device": (
        {"index": GOOD.index.to("meta")},
        r"x is on cpu, but top_k_index on meta and top_k_weights on cpu",
    ),
    "weights on another device": (
        {"weights": GOOD.weights.to("meta")},
        r"x is on cpu, but top_k_index on cpu and top_k_weights on meta",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case):
    changes, message = WRONG[case]
    with pytest.raises(InputError, match=f"moe.experts: .*{message}"):
        experts(*replaced(**changes))


def test_layout_is_named():
    with pytest.raises(InputError, match=r"transposed=True, gate_up_proj \[5, 12, 8\] asks for itself as \[5, 8, 8\]"):
        experts(*GOOD.args, transposed=True)


def test_width_of_a_plain_activation_is_not_halved():
    with pytest.raises(
        InputError, match=r"activation 'relu' .* for down_proj as \[5, 8, 12\]; got down_proj \[5, 8, 6\]"
    ):
        experts(*GOOD.args, activation="relu")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("swigluu", "swiglu"), ("gelu-tanh", "gelu_tanh"), ("relu_2", "relu2"), ("SiLU", "silu")],
)
def test_unknown_activation_offers_the_nearest(name, nearest):
    with pytest.raises(
        UnknownNameError, match=f"unknown activation {name!r}: (did you mean .*'{nearest}'|known: .*{nearest})"
    ):
        experts(*GOOD.args, activation=name)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_right_arguments_pass_on_every_layout(activation):
    for transposed in (False, True):
        inputs = make_inputs(activation=activation, transposed=transposed, bias=True)
        assert experts(*inputs.args, activation=activation, transposed=transposed).shape == (11, 8)
        if activation in GATED:
            experts(*inputs.args, activation=activation, transposed=transposed, interleaved=True)


def test_an_error_is_one_of_ours_and_a_value_error():
    with pytest.raises(ValueError, match=r"moe\.experts: x must be") as caught:
        experts(*replaced(x=GOOD.x[0]))
    assert isinstance(caught.value, KptError)


def test_no_expert_at_all_is_refused():
    none = torch.ones(0, 4, 8), torch.ones(0, 8, 2)
    with pytest.raises(InputError, match="gate_up_proj holds no expert"):
        experts(torch.ones(3, 8), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), *none)
