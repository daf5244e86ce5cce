"""An 8-bit weight's linear layer beside the same in float64, and what it leaves to others."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kpt_triton.fp8 import linear
from kpt_triton.tile import Tile


class LinearCall(NamedTuple):
    """What the kernel reads of a call."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None = None
    granularity: str = "row"
    activations: str = "none"
    needs: tuple[str, ...] = ("x", "bias")
    config: dict[str, str] | None = None


def call_of(granularity: str, rows: int, *, inner: int = 300, columns: int = 200, **changes: object) -> LinearCall:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(columns, inner, generator=generator).to(torch.float8_e4m3fn)
    shape = {"tensor": (), "row": (columns,), "128x128": (-(-columns // 128), -(-inner // 128))}[granularity]
    scale = torch.rand(shape, generator=generator) + 0.5
    x, bias = torch.randn(rows, inner, generator=generator), torch.randn(2 * columns, generator=generator)[::2]
    return LinearCall(x, weight, scale, bias, granularity)._replace(**changes)


def wide_weight(call: LinearCall) -> Tensor:
    scale = call.scale.double()
    if call.granularity == "row":
        scale = scale[:, None]
    elif call.granularity == "128x128":
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(call.weight), : call.weight.shape[1]]
    return call.weight.double() * scale


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize("rows", [1, 20, 70])
@pytest.mark.parametrize("granularity", ["tensor", "row", "128x128"])
def test_result_and_gradients_are_those_of_the_numbers(granularity: str, rows: int) -> None:
    call = call_of(granularity, rows)
    weight, bias = wide_weight(call), call.bias
    assert bias is not None
    got = linear.forward(call)
    torch.testing.assert_close(got.double(), call.x.double() @ weight.t() + bias.double(), rtol=1e-5, atol=1e-4)
    grad = torch.randn_like(got)
    found = linear.backward(call, (), grad)
    torch.testing.assert_close(found["x"].double(), grad.double() @ weight, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found["bias"].double(), grad.double().sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tile", ["16x16x64 w4 s4 g1", "16x32x128 w4 s4 g1"])
def test_narrow_tiles_give_what_others_do(tile: str) -> None:
    call = call_of("128x128", 5)
    torch.testing.assert_close(
        linear.forward(call._replace(config={"tile": tile})), linear.forward(call), rtol=1e-4, atol=1e-4
    )


def test_tiles_are_as_narrow_as_it_takes_and_tall_ones_stay() -> None:
    few, tall = Tile(16, 64, 128), Tile(128, 256, 64)
    widths = [linear.narrowed(few, columns, 132).n for columns in (14336, 4096, 1024)]
    assert widths == [64, 32, 16]
    assert linear.narrowed(few, 14336, 132) == few
    assert linear.narrowed(tall, 1024, 132) == tall


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (call_of("row", 2), None),
        (call_of("row", 2, activations="row"), "activations in 8 bits"),
        (call_of("row", 2)._replace(granularity="1x128"), "parts of rows"),
        (call_of("row", 1025), "more than 1024 rows"),
        (call_of("row", 0), "nothing to compute"),
        (call_of("row", 2)._replace(weight=torch.zeros(4, 300).to(torch.float8_e4m3fnuz)), "fnuz"),
        (call_of("row", 2)._replace(scale=torch.ones(200, dtype=torch.float64)), "float64"),
    ],
)
def test_it_says_what_it_leaves_to_others(call: LinearCall, sentence: str | None) -> None:
    said = linear.unsupported(call)
    assert said is None if sentence is None else sentence in str(said)


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_code_is_widened_to_its_number(dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)[:, None]
    call = call_of("tensor", 1, inner=1, columns=256)._replace(
        x=torch.ones(1, 1, dtype=x_dtype), weight=codes, scale=torch.ones(()), bias=None
    )
    torch.testing.assert_close(linear.forward(call)[0], codes[:, 0].to(x_dtype), rtol=0, atol=0, equal_nan=True)
