import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from kpt_core import InputError
from kpt_moe.grouped_mm import grouped_mm, grouped_mm_wgrad

pytestmark = pytest.mark.usefixtures("product")

LOADS = {
    "some": [4, 0, 7, 1, 0],
    "none": [0, 0, 0, 0, 0],
    "first": [12, 0, 0, 0, 0],
    "last": [0, 0, 0, 0, 12],
    "sixty-three": [63, 1, 0, 64, 65],
}
TRAILING = [0, 3]


def ends(loads: list[int]) -> Tensor:
    return torch.tensor(loads).cumsum(0).to(torch.int32)


def naive(x: Tensor, weight: Tensor, loads: list[int]) -> Tensor:
    """Row by row."""
    experts = [expert for expert, load in enumerate(loads) for _ in range(load)]
    rows = [x[row] @ weight[expert] for row, expert in enumerate(experts)]
    rows += [x.new_zeros(weight.shape[2])] * (x.shape[0] - len(experts))
    return torch.stack(rows) if rows else x.new_zeros(0, weight.shape[2])


def make(loads: list[int], trailing: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    rows = sum(loads) + trailing
    return torch.randn(rows, 4).to(dtype), torch.randn(len(loads), 4, 3).to(dtype), ends(loads)


@pytest.mark.parametrize("trailing", TRAILING)
@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("stored", ["as [K, N]", "as [N, K]"])
def test_value(loads, trailing, stored):
    x, weight, offsets = make(loads, trailing)
    if stored == "as [N, K]":
        weight = weight.mT.contiguous().mT
    torch.testing.assert_close(grouped_mm(x, weight, offsets), naive(x, weight, loads))


@pytest.mark.parametrize("trailing", TRAILING)
@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS)
def test_wgrad_value(loads, trailing):
    x, _, offsets = make(loads, trailing)
    grad = torch.randn(x.shape[0], 3, dtype=x.dtype)
    starts = [0, *offsets.tolist()[:-1]]
    expected = [x[start:end].t() @ grad[start:end] for start, end in zip(starts, offsets.tolist(), strict=True)]
    torch.testing.assert_close(grouped_mm_wgrad(x, grad, offsets), torch.stack(expected))


@pytest.mark.parametrize("trailing", TRAILING)
def test_first_and_second_derivative(trailing):
    x, weight, offsets = make(LOADS["some"], trailing)
    x.requires_grad_()
    weight.requires_grad_()
    assert gradcheck(grouped_mm, (x, weight, offsets))
    assert gradgradcheck(grouped_mm, (x, weight, offsets))


@pytest.mark.parametrize("trailing", TRAILING)
def test_first_and_second_derivative_of_wgrad(trailing):
    x, _, offsets = make(LOADS["some"], trailing)
    grad = torch.randn(x.shape[0], 3, dtype=x.dtype, requires_grad=True)
    x.requires_grad_()
    assert gradcheck(grouped_mm_wgrad, (x, grad, offsets))
    assert gradgradcheck(grouped_mm_wgrad, (x, grad, offsets))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_trailing_rows_are_neither_read_nor_left_uninitialised(poison):
    x, weight, offsets = make(LOADS["some"], trailing=3)
    end = int(offsets[-1])
    clean = x[:end].clone()
    x[end:] = poison
    x.requires_grad_()
    weight.requires_grad_()
    out = grouped_mm(x, weight, offsets)
    assert torch.equal(out[end:], torch.zeros(3, 3, dtype=x.dtype))
    grad = torch.randn_like(out)
    grad[end:] = poison
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight), grad)
    assert torch.equal(grad_x[end:], torch.zeros(3, 4, dtype=x.dtype))
    torch.testing.assert_close(grad_weight, grouped_mm_wgrad(clean, grad[:end], offsets))


def test_wgrad_does_not_read_trailing_rows():
    x, _, offsets = make(LOADS["some"], trailing=3)
    grad = torch.randn(x.shape[0], 3, dtype=x.dtype)
    expected = grouped_mm_wgrad(x, grad, offsets)
    x[int(offsets[-1]) :] = float("nan")
    grad[int(offsets[-1]) :] = float("nan")
    assert torch.equal(grouped_mm_wgrad(x, grad, offsets), expected)


@pytest.mark.parametrize("product", ["loop", "product"], indirect=True)
@pytest.mark.parametrize("stored", ["as [K, N]", "as [N, K]"])
def test_gradient_of_the_weight_has_its_memory_order(stored):
    x, weight, offsets = make(LOADS["some"])
    weight = (weight.mT.contiguous().mT if stored == "as [N, K]" else weight).requires_grad_()
    (grad,) = torch.autograd.grad(grouped_mm(x, weight, offsets).sum(), weight)
    assert grad.stride() == weight.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounds_once(dtype):
    # The product is accumulated in float32 and rounded once, so each result lies within half a unit in the last place
    # of the exact product, plus what float32 loses over K=64 terms.
    loads = [5, 0, 9]
    x, weight = torch.randn(14, 64).to(dtype), torch.randn(3, 64, 16).to(dtype)
    exact = naive(x.double(), weight.double(), loads)
    size = naive(x.double().abs(), weight.double().abs(), loads)
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + 64 * 2**-24 * size
    assert ((grouped_mm(x, weight, ends(loads)).double() - exact).abs() <= bound).all()


def test_repeats_bitwise():
    x, weight, offsets = make(LOADS["sixty-three"], dtype=torch.float32)
    first = grouped_mm(x, weight, offsets)
    assert all(torch.equal(grouped_mm(x, weight, offsets), first) for _ in range(3))


OPERATORS = {
    "grouped_mm": lambda: (torch.randn(8, 4), torch.randn(3, 4, 5), ends([2, 0, 4])),
    "grouped_mm_wgrad": lambda: (torch.randn(8, 4), torch.randn(8, 5), ends([2, 0, 4])),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("operation", [grouped_mm, grouped_mm_wgrad], ids=lambda operation: operation.__name__)
def test_compiles_without_a_break(operation, dynamic):
    compiled = torch.compile(operation, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (8, 9):
        left, right, offsets = OPERATORS[operation.__name__]()
        left = torch.randn(rows, 4, requires_grad=True)
        right = (right if operation is grouped_mm else torch.randn(rows, 5)).requires_grad_()
        want, have = operation(left, right, offsets), compiled(left, right, offsets)
        torch.testing.assert_close(have, want)
        torch.testing.assert_close(
            torch.autograd.grad(have.square().sum(), (left, right)),
            torch.autograd.grad(want.square().sum(), (left, right)),
        )


class Product(torch.nn.Module):
    def forward(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return grouped_mm(x, weight, offsets)


def test_exports_with_any_number_of_rows():
    args = OPERATORS["grouped_mm"]()
    shapes = {"x": {0: torch.export.Dim.DYNAMIC}, "weight": None, "offsets": None}
    program = torch.export.export(Product(), args, dynamic_shapes=shapes).module()
    x = torch.randn(11, 4)
    torch.testing.assert_close(program(x, *args[1:]), grouped_mm(x, *args[1:]))


def test_meta_has_shapes():
    x, weight, offsets = (tensor.to("meta") for tensor in OPERATORS["grouped_mm"]())
    out = grouped_mm(x, weight, offsets)
    assert (out.shape, out.dtype, out.device.type) == ((8, 5), torch.float32, "meta")
    assert grouped_mm_wgrad(x, out, offsets).shape == (3, 4, 5)


X, WEIGHT, OFFSETS = torch.ones(6, 4), torch.ones(3, 4, 5), ends([2, 0, 4])
WRONG = {
    "x has one dimension": (X[0], WEIGHT, OFFSETS, r"equal K; got \[4\] and \[3, 4, 5\]"),
    "K differs": (X[:, :3], WEIGHT, OFFSETS, r"equal K; got \[6, 3\] and \[3, 4, 5\]"),
    "weight has two dimensions": (X, WEIGHT[0], OFFSETS, r"equal K; got \[6, 4\] and \[4, 5\]"),
    "offsets are int64": (X, WEIGHT, OFFSETS.long(), r"offsets must be int32 of shape \[3\].*got torch.int64 \[3\]"),
    "offsets of another length": (X, WEIGHT, OFFSETS[:2], r"offsets must be int32 of shape \[3\].*got .* \[2\]"),
    "two dtypes": (X, WEIGHT.double(), OFFSETS, r"one floating dtype, .*; got torch.float32 and torch.float64"),
    "float8": (X.to(torch.float8_e5m2), WEIGHT.to(torch.float8_e5m2), OFFSETS, "float16; got torch.float8_e5m2 and"),
    "integers": (X.long(), WEIGHT.long(), OFFSETS, r"one floating dtype, .*; got torch.int64"),
    "two devices": (X, WEIGHT.to("meta"), OFFSETS, r"on one device; got cpu, meta and cpu"),
}
WRONG_WGRAD = {
    "rows differ": (X, torch.ones(5, 2), OFFSETS, r"equal rows; got \[6, 4\] and \[5, 2\]"),
    "grad has three dimensions": (X, torch.ones(6, 2, 2), OFFSETS, r"equal rows; got \[6, 4\] and \[6, 2, 2\]"),
    "offsets have two dimensions": (X, X, OFFSETS[None], r"offsets must be int32.*got torch.int32 \[1, 3\]"),
    "two dtypes": (X, X.half(), OFFSETS, r"one floating dtype, .*; got torch.float32 and torch.float16"),
    "offsets on another device": (X, X, OFFSETS.to("meta"), r"on one device; got cpu, cpu and meta"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(case):
    *args, message = WRONG[case]
    with pytest.raises(InputError, match=rf"moe.grouped_mm: .*{message}"):
        grouped_mm(*args)


@pytest.mark.parametrize("case", WRONG_WGRAD)
def test_wrong_arguments_of_wgrad_are_named(case):
    *args, message = WRONG_WGRAD[case]
    with pytest.raises(InputError, match=rf"moe.grouped_mm_wgrad: .*{message}"):
        grouped_mm_wgrad(*args)
