"""Products of codes against float64, as the chip multiplies them and widened; what is copied, and what is refused."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kpt_triton.chips import NVIDIA, SHORT_SUMS, multiplied
from kpt_triton.fp8 import scaled_mm
from kpt_triton.fp8.scaled_mm import _SHARED, _program, default_tile, forward, unsupported

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E4M3_FNUZ, E5M2_FNUZ = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
#: Columns of scales of a row.
BY = ("tensor", "row", "1x128", "128x128", "1x32")


class ScaledCall(NamedTuple):
    """What the kernel reads of a call."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    bias: Tensor | None = None
    granularity_a: str = "row"
    granularity_b: str = "row"
    out_dtype: torch.dtype = torch.float32
    config: dict[str, str] | None = None


def spread(scale: Tensor, by: str, rows: int, inner: int) -> Tensor:
    """Each number's scale `[rows, inner]`, in float64."""
    scale = scale.double().cpu()
    if scale.dim() < 2:
        return scale.reshape(-1, 1).expand(rows, inner)
    high, wide = _SHARED[by]
    return scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :inner]


def scales_of(rows: int, inner: int, by: str) -> Tensor:
    high, wide = _SHARED[by]
    drawn = torch.rand(-(-rows // high), -(-inner // wide) if wide else 1) + 0.5
    return drawn[0, 0] if by == "tensor" else drawn if wide else drawn[:, 0]


def call_of(
    by_a: str = "row", by_b: str = "row", a: torch.dtype = E4M3, b: torch.dtype = E4M3, sizes: Any = (70, 300, 140)
) -> ScaledCall:
    rows, inner, columns = sizes
    scale_b = scales_of(columns, inner, by_b)
    return ScaledCall(
        torch.randn(rows, inner).to(a),
        torch.randn(columns, inner).to(b).t(),
        scales_of(rows, inner, by_a),
        scale_b.t() if scale_b.dim() == 2 else scale_b,
        torch.randn(2 * columns, dtype=torch.bfloat16)[::2],
        by_a,
        by_b,
    )


def moved(call: ScaledCall, device: torch.device) -> ScaledCall:
    return ScaledCall(*(each.to(device) if isinstance(each, Tensor) else each for each in call))


def expected(call: ScaledCall) -> Tensor:
    (rows, inner), columns = call.a.shape, call.b.shape[1]
    scale_b = call.scale_b.t() if call.scale_b.dim() == 2 else call.scale_b
    left = call.a.cpu().double() * spread(call.scale_a, call.granularity_a, rows, inner)
    right = call.b.cpu().t().double() * spread(scale_b, call.granularity_b, columns, inner)
    return left @ right.t() + (0 if call.bias is None else call.bias.cpu().double())


def check(call: ScaledCall, device: torch.device) -> None:
    """Assert that a call has its result: on a chip as far as its units add."""
    assert unsupported(call) is None
    wanted = expected(call)
    bound = (1e-6 if device.type == "cpu" else 1e-3) * wanted.abs().max().item()
    torch.testing.assert_close(forward(moved(call, device)).cpu().double(), wanted, rtol=0, atol=bound)


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chip that multiplies no 8-bit numbers."""
    monkeypatch.setattr(scaled_mm, "multiplied", lambda chip: ())


@pytest.mark.parametrize("by_a", BY)
@pytest.mark.parametrize("by_b", BY)
def test_each_pair_of_granularities(by_a: str, by_b: str, device: torch.device) -> None:
    check(call_of(by_a, by_b), device)


@pytest.mark.parametrize("by", [("row", "row"), ("1x128", "128x128"), ("1x32", "tensor")])
def test_widened_codes_give_the_same(by: tuple[str, str], device: torch.device, widened: None) -> None:
    check(call_of(*by), device)
    check(call_of(*by, E5M2, E4M3_FNUZ), device)


@pytest.mark.parametrize("dtype", [E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ], ids=str)
@pytest.mark.parametrize("native", [True, False])
def test_every_code_is_its_number(
    dtype: torch.dtype, native: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(scaled_mm, "multiplied", lambda chip: ())
    other = E4M3 if dtype in (E4M3, E5M2) else E4M3_FNUZ
    codes, one = torch.zeros(256, 16, dtype=torch.uint8), torch.zeros(16, 16)
    codes[:, 0], one[0] = torch.arange(256), 1
    a = codes.view(dtype)
    call = ScaledCall(a, one.to(other), torch.tensor(1.0), torch.tensor(1.0), None, "tensor", "tensor")
    got = forward(moved(call, device)).cpu()
    torch.testing.assert_close(got, a[:, :1].float().expand(-1, 16), rtol=0, atol=0, equal_nan=True)
    turned = call._replace(a=one.t().contiguous().to(other), b=a.t())
    torch.testing.assert_close(forward(moved(turned, device)).cpu(), got.t(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("by", [("row", "row"), ("1x128", "128x128")])
def test_two_scales_whose_product_is_out_of_range(by: tuple[str, str], device: torch.device) -> None:
    call = call_of(*by)._replace(bias=None)
    full = call._replace(
        a=torch.full((70, 300), 448.0).to(E4M3),
        b=torch.full((300, 140), 448.0).to(E4M3),
        scale_a=call.scale_a * 1e-24,
        scale_b=call.scale_b * 1e-19,
    )
    assert (full.scale_a.max() * full.scale_b.max()).item() < torch.finfo(torch.float32).tiny
    check(full, device)


@pytest.mark.parametrize("inner", [1, 33, 128, 200])
def test_operands_of_any_strides_and_sizes(inner: int, device: torch.device) -> None:
    call = call_of("1x128", "1x128", sizes=(9, inner, 17))
    wide = torch.randn(9, 2 * inner + 3).to(E4M3)
    for a in (wide[:, 3 : 3 + inner], wide[:, : 2 * inner : 2], wide[:1, :inner].expand(9, inner)):
        for b in (call.b, call.b.contiguous()):
            check(call._replace(a=a, b=b), device)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
def test_a_result_is_rounded_once(out: torch.dtype, device: torch.device) -> None:
    call = call_of("1x128", "128x128")
    wide = forward(moved(call, device))
    assert torch.equal(forward(moved(call._replace(out_dtype=out), device)), wide.to(out))


def test_exponents_alone_are_scales(device: torch.device) -> None:
    call = call_of("1x32", "1x32")
    powers = {
        name: torch.exp2(torch.randint(-3, 4, getattr(call, name).shape)) for name in ("scale_a", "scale_b")
    }  # fmt: skip
    exponents = {name: each.to(torch.float8_e8m0fnu) for name, each in powers.items()}
    got = forward(moved(call._replace(**exponents), device))
    assert torch.equal(got, forward(moved(call._replace(**powers), device)))


def test_a_configuration_names_the_tile(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    call, seen = call_of("1x128", "128x128"), []
    real = scaled_mm._constants
    monkeypatch.setattr(scaled_mm, "_constants", lambda tile, settings: seen.append(tile) or real(tile, settings))
    check(call._replace(config={"tile": "32x32x64 w4 s2 g2"}), device)
    assert [str(each) for each in seen] == ["32x32x64 w4 s2 g2"]


@pytest.mark.parametrize(
    ("changes", "chip", "sentence"),
    [
        ({}, "sm89", None),
        ({"out_dtype": torch.float64}, "sm89", "a result in float64"),
        ({"scale_a": torch.ones(70, dtype=torch.float64)}, "sm89", "scales in float64"),
        ({"a": torch.zeros(0, 300).to(E4M3)}, "sm89", "nothing to compute"),
        ({"a": torch.zeros(1025, 300).to(E4M3)}, "sm80", "more than 1024 rows of codes to widen on sm80"),
        ({"a": torch.zeros(1025, 300).to(E4M3), "out_dtype": torch.bfloat16}, "sm89", None),
        ({"a": torch.zeros(1025, 300).to(E4M3)}, "sm89", "more than 1024 rows"),
        ({"a": torch.zeros(1025, 300).to(E4M3), "granularity_b": "128x128"}, "sm80", None),
        ({"a": torch.zeros(2, 300).to(E5M2)}, "gfx90a", "e5m2 on gfx90a"),
        ({}, "gfx90a", None),
    ],
)
def test_it_says_what_it_leaves_to_others(
    changes: dict[str, Any], chip: str, sentence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaled_mm, "chip_of", lambda device: chip)
    said = unsupported(call_of()._replace(**changes))
    assert said is None if sentence is None else sentence in str(said)


def test_codes_are_widened_where_units_lack_them_or_bits() -> None:
    chips = (*NVIDIA, "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "pvc")
    for out in (torch.bfloat16, torch.float32):
        native, other = _program("e4m3", (E4M3, E4M3), ("row", "row"), out=out)
        for chip in chips:
            multiplies = E4M3 in multiplied(chip) and (out is torch.bfloat16 or chip not in SHORT_SUMS)
            assert native.contracts[chip].startswith("not offered") != multiplies
            assert other.contracts[chip].startswith("not offered") == multiplies
            (launch,) = (native if multiplies else other).configurations(chip).values()
            assert launch["FORMAT_A"] == launch["FORMAT_B"] == ("" if multiplies else "e4m3fn")
            # Sums of units that have fewer bits than float32 are added up outside them.
            assert bool(launch["PROMOTE"]) == (multiplies and chip in SHORT_SUMS)


def test_units_of_64_rows_are_given_as_many() -> None:
    for chip in ("sm90", "sm100"):
        assert {default_tile(chip, rows).m for rows in (1, 16, 32, 64)} == {64}
    assert [default_tile("sm89", rows).m for rows in (1, 17, 33, 65)] == [16, 32, 64, 128]
