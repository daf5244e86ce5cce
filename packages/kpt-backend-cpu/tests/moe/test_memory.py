"""Tensors whose memory does not hold what they say: freed ones are refused by name, the others are resolved."""

import pytest
import torch

from kpt_core import InputError


def calls():
    """Name of a call to its kernel, and its arguments by name."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    few = {
        "x": normal(3, 6),
        "top_k_index": torch.tensor([[0, 1], [1, 0], [1, 2]]),
        "top_k_weights": normal(3, 2),
        "gate_up_proj": normal(2, 8, 6),
        "down_proj": normal(2, 6, 4),
        "gate_up_proj_bias": normal(2, 8),
        "down_proj_bias": normal(2, 6),
    }
    exchanged = {"gate_up_proj": few["gate_up_proj"].mT, "down_proj": few["down_proj"].mT, "transposed": True}
    copied = {"x": normal(6, 3).t(), "top_k_index": few["top_k_index"].t().contiguous().t()}
    codes = {name: few[name].to(torch.float8_e4m3fn) for name in ("gate_up_proj", "down_proj")}
    scales = {"gate_up_scale": normal(2, 8).abs(), "down_scale": normal(2, 6).abs().double()}
    products = {"x": normal(5, 6), "weight": normal(2, 6, 4), "offsets": torch.tensor([2, 5], dtype=torch.int32)}
    eight_bits = {"weight": products["weight"].to(torch.float8_e5m2), "scale": normal(2, 4).abs()}
    return {
        "decode": ("decode", few),
        "decode transposed": ("decode", {**few, **exchanged}),
        "decode copied": ("decode", {**few, **copied}),
        "decode scaled": ("decode", {**few, **codes, **scales}),
        "experts": ("experts", few),
        "experts transposed": ("experts", {**few, **exchanged}),
        "experts scaled": ("experts", {**few, **codes, **scales}),
        "grouped_mm": ("grouped_mm", products),
        "grouped_mm transposed": ("grouped_mm", {**products, "weight": normal(2, 4, 6).mT}),
        "grouped_mm_wgrad": (
            "grouped_mm_wgrad",
            {"x": products["x"], "grad": normal(5, 4), "offsets": products["offsets"]},
        ),
        "scaled_grouped_mm": ("scaled_grouped_mm", {**products, **eight_bits}),
        "scaled_grouped_mm of 8 bits": (
            "scaled_grouped_mm",
            {**products, **eight_bits, "x": products["x"].to(torch.float8_e4m3fn), "x_scale": normal(5, 1).abs()},
        ),
        "top_k_gating": ("top_k_gating", {"logits": normal(3, 8), "correction_bias": normal(8).abs(), "top_k": 2}),
    }


def tensors_of(arguments):
    return [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]


ARGUMENTS = pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, (_, arguments) in calls().items() for name in tensors_of(arguments)]
)


def inside(x):
    """The same numbers and strides, at an offset in their storage."""
    room = torch.empty(x.untyped_storage().nbytes() // x.itemsize + 3, dtype=x.dtype)
    return room.as_strided(x.shape, x.stride(), 3).copy_(x)


def freed(x):
    x.untyped_storage().resize_(0)
    return x


@ARGUMENTS
@pytest.mark.parametrize("offset", [False, True], ids=["whole", "with an offset"])
def test_a_freed_tensor_is_refused_by_name(call, name, offset, trained):
    kernel, arguments = calls()[call]
    arguments[name] = freed(inside(arguments[name]) if offset else arguments[name].clone())
    with pytest.raises(InputError, match=rf"^moe\.\w+: {name} \[.*\] has no memory: its storage was freed .*gather it"):
        trained[kernel](**arguments)


@ARGUMENTS
def test_a_tensor_that_is_negated_when_it_is_read_counts_with_its_sign(call, name, kernels):
    kernel, arguments = calls()[call]
    want = kernels[kernel](**arguments)
    if arguments[name].itemsize == 1:
        pytest.skip("PyTorch negates no numbers of 8 bits")
    arguments[name] = torch._neg_view(-arguments[name])
    assert arguments[name].is_neg()
    got = kernels[kernel](**arguments)
    assert all(map(torch.equal, *((each,) if torch.is_tensor(each) else each for each in (got, want))))


@ARGUMENTS
def test_zeros_without_memory_are_zeros(call, name, kernels):
    kernel, arguments = calls()[call]
    shape, dtype = arguments[name].shape, arguments[name].dtype
    want = kernels[kernel](**{**arguments, name: torch.zeros(shape, dtype=dtype)})
    got = kernels[kernel](**{**arguments, name: torch._efficientzerotensor(shape, dtype=dtype)})
    assert all(map(torch.equal, *((each,) if torch.is_tensor(each) else each for each in (got, want))))


#: What wants a gradient; what else a gradient depends on.
TRAINED = {
    "experts": (
        ("x", "top_k_weights", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"),
        ("top_k_index",),
    ),
    "experts scaled": (("x", "top_k_weights"), ("gate_up_proj", "down_scale")),
    "experts transposed": (("x",), ("gate_up_proj", "down_proj")),
    "grouped_mm": (("x", "weight"), ("offsets",)),
    "grouped_mm transposed": (("x",), ("weight",)),
    "grouped_mm_wgrad": (("x", "grad"), ("offsets",)),
    "scaled_grouped_mm": (("x",), ("weight", "scale", "offsets")),
    "top_k_gating": (("logits",), ()),
}


def training(call, trained):
    """What a kernel gives, its leaves and all of its arguments."""
    kernel, arguments = calls()[call]
    leaves = {name: arguments[name].clone().requires_grad_() for name in TRAINED[call][0]}
    arguments = {**arguments, **leaves}
    out = trained[kernel](**arguments)
    return (out if torch.is_tensor(out) else out[0]), tuple(leaves.values()), arguments


@pytest.mark.parametrize("call", TRAINED)
def test_cotangents_that_are_negated_or_zeros_without_memory_are_read_as_such(call, trained):
    out, leaves, _ = training(call, trained)
    pull = torch.linspace(-1, 1, out.numel()).view_as(out)
    for odd, plain in (
        (torch._neg_view(-pull), pull),
        (torch._efficientzerotensor(out.shape), torch.zeros_like(out)),
    ):
        got, want = (torch.autograd.grad(out, leaves, each, retain_graph=True) for each in (odd, plain))
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("call", TRAINED)
def test_a_cotangent_that_was_freed_is_refused(call, trained):
    out, leaves, _ = training(call, trained)
    with pytest.raises(InputError, match=r"moe\.\w+: the gradient of the \w+ .* has no memory"):
        torch.autograd.grad(out, leaves, freed(torch.ones_like(out)))


READ = [(call, name) for call, (wanted, others) in TRAINED.items() for name in (*wanted, *others)]


@pytest.mark.parametrize(("call", "name"), [each for each in READ if each != ("scaled_grouped_mm", "x")])
def test_what_was_freed_before_backward_is_refused_by_name(call, name, trained):
    out, leaves, arguments = training(call, trained)
    freed(arguments[name])
    with pytest.raises(InputError, match=rf"moe\.\w+: {name} .* has no memory"):
        torch.autograd.grad(out, leaves, torch.ones_like(out))


def test_tensors_without_elements_are_not_freed_ones(kernels):
    offsets = torch.tensor([0, 0], dtype=torch.int32)
    assert kernels["grouped_mm"](torch.empty(0, 6), torch.randn(2, 6, 4), offsets).shape == (0, 4)
