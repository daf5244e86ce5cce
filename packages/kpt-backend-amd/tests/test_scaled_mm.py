"""`fp8.scaled_mm` by hipBLASLt: which calls a chip takes; how it is called, by the numbers of torch on a CPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kpt_backend_amd import BACKEND, scaled_mm
from kpt_core import get_op
from kpt_fp8 import quantize
from simulated_cuda import FakeDevice, simulate

FN, E5M2, FNUZ, E5M2_FNUZ = (getattr(torch, f"float8_{name}") for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"))


def call(a=FN, b=FN, by="tensor", rows=3, inner=32, columns=48, out=torch.bfloat16, bias=None, **changes):
    x, w = torch.randn(rows, inner), torch.randn(columns, inner)
    (left, scale_a), (right, scale_b) = (quantize(t, dtype=d, granularity=by) for t, d in ((x, a), (w, b)))
    bias = None if bias is None else torch.randn(columns).to(bias)
    options = {"granularity_a": by, "granularity_b": by, "out_dtype": out}
    return get_op("fp8.scaled_mm").bind(left, right.t(), scale_a, scale_b, bias, **options)._replace(**changes)


@pytest.fixture
def on(monkeypatch):
    """Make a chip of the CPU, under a ROCm, for the gate alone."""

    def see(chip, hip="7.0.0"):
        monkeypatch.setattr(scaled_mm, "_chip", lambda device: chip)
        monkeypatch.setattr(torch.version, "hip", hip)

    return see


@pytest.mark.parametrize(
    ("chip", "hip", "a", "b", "refused"),
    [
        ("gfx942", "6.4.1", FNUZ, FNUZ, None),
        ("gfx942", "6.4.1", E5M2_FNUZ, FNUZ, None),
        (
            "gfx942", "7.0.0", FN, FN,
            "float8_e4m3fn by float8_e4m3fn; gfx942 multiplies float8_e4m3fnuz and float8_e5m2fnuz",
        ),
        ("gfx942", "7.0.0", FNUZ, E5M2, "float8_e4m3fnuz by float8_e5m2; gfx942 multiplies"),
        ("gfx950", "7.0.0", FN, E5M2, None),
        ("gfx950", "7.0.0", FNUZ, FNUZ, "gfx950 multiplies float8_e4m3fn and float8_e5m2"),
        ("gfx950", "6.4.1", FN, FN, "gfx950 multiplies no 8-bit numbers"),
        ("gfx1201", "6.5.0", FN, FN, None),
        ("gfx1201", "6.5.0", FNUZ, FNUZ, "gfx1201 multiplies float8_e4m3fn and float8_e5m2"),
        ("gfx1100", "7.0.0", FN, FN, "gfx1100 multiplies no 8-bit numbers"),
        ("gfx90a", "7.0.0", FNUZ, FNUZ, "gfx90a multiplies no 8-bit numbers"),
    ],
)  # fmt: skip
def test_a_chip_takes_its_own_numbers_and_refuses_others_in_a_sentence(on, chip, hip, a, b, refused):
    on(chip, hip)
    found = scaled_mm.unsupported(call(a, b))
    assert found is None if refused is None else refused in str(found)


def test_a_device_of_another_type_has_no_numbers_of_its_own():
    assert str(scaled_mm.unsupported(call())).endswith("cpu multiplies no 8-bit numbers")


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"by": "row"}, None),
        ({"by": "row", "out": torch.float32}, "a result in torch.float32 of scales by row; needs bfloat16"),
        ({"by": "row", "a": E5M2}, None),
        ({"by": "row", "b": E5M2}, "b is e5m2; needs e4m3"),
        ({"by": "1x128"}, "scales by 1x128 and 1x128; needs one for each tensor, or each row"),
        ({"granularity_b": "row"}, "scales by tensor and row"),
        ({"scale_a": torch.ones((), dtype=torch.float64)}, "scales in torch.float64 and torch.float32; needs float32"),
        ({"out": torch.float32}, None),
        ({"out": torch.float64}, "a result in torch.float64"),
        ({"bias": torch.bfloat16}, None),
        ({"bias": torch.float32}, None),
        ({"bias": torch.bfloat16, "by": "row"}, None),
        ({"bias": torch.float32, "by": "row"}, "a bias in torch.float32, and scales by row; needs bfloat16"),
        ({"rows": 1}, None),
        ({"rows": 0}, "[0, 32] by [32, 48]; needs K and N in multiples of 16, nothing empty"),
        ({"inner": 24}, "[3, 24] by [24, 48]; needs K and N"),
        ({"columns": 40}, "[3, 32] by [32, 40]; needs K and N"),
        ({"a": FN, "offset": 1}, "start within 16 bytes"),
    ],
)  # fmt: skip
def test_what_the_library_does_not_do_is_refused_in_a_sentence(on, given, refused):
    on("gfx950")
    given = dict(given)
    offset = given.pop("offset", 0)
    made = call(**given)
    if offset:
        made = made._replace(a=torch.zeros(3 * 32 + offset, dtype=torch.uint8)[offset:].view(FN).view(3, 32))
    found = scaled_mm.unsupported(made)
    assert found is None if refused is None else refused in str(found)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [torch.bfloat16, torch.float16, torch.float32, torch.float64, None])
def test_a_bias_of_any_type_is_added_before_the_one_rounding(out, bias):
    made = call(rows=64, out=out, bias=bias)
    if bias is not None:
        made.bias.mul_(100)  # so that rounding it, or the sum twice, would show
    found = scaled_mm.forward(made)
    wanted = get_op("fp8.scaled_mm").run_reference(made._replace(out_dtype=torch.float64))
    assert found.dtype is out
    step = torch.finfo(out).eps / 2 + 2**-20
    assert ((found.double() - wanted).abs() <= step * wanted.abs() + 2**-18 * wanted.abs().max()).all()


@pytest.mark.parametrize("by", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [FN, FNUZ])
@pytest.mark.parametrize("layout", ["K contiguous", "N contiguous", "parts of others"])
def test_numbers_are_the_references_whatever_the_strides(by, dtype, layout):
    made = call(dtype, dtype, by=by, bias=torch.bfloat16)
    if layout == "N contiguous":
        made = made._replace(b=made.b.contiguous())
    if layout == "parts of others":
        wide = torch.stack([made.bias, -made.bias], 1)
        scales = {n: torch.stack([s, -s], -1)[..., 0] for n in ("scale_a", "scale_b") for s in (getattr(made, n),)}
        made = made._replace(a=made.a.t().contiguous().t(), bias=wide[:, 0], **scales)
    wanted = get_op("fp8.scaled_mm").run_reference(made._replace(out_dtype=torch.float64))
    torch.testing.assert_close(scaled_mm.forward(made).double(), wanted, rtol=2**-7, atol=2**-6)


def test_on_a_simulated_mi300x_the_library_comes_first_and_takes_its_own_numbers(monkeypatch):
    mi300x = FakeDevice(name="AMD Instinct MI300X", extra={"gcnArchName": "gfx942:sramecc+:xnack-"})
    simulate(monkeypatch, mi300x)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    scaled_mm._chip.cache_clear()
    get_op("fp8.scaled_mm").forget()
    try:
        with FakeTensorMode():
            codes, scale = torch.empty(16, 32, dtype=FNUZ, device="cuda:0"), torch.ones((), device="cuda:0")
            options = {"granularity_a": "tensor", "granularity_b": "tensor"}
            made = get_op("fp8.scaled_mm").bind(codes, codes.t(), scale, scale, **options)
        (first, *_) = get_op("fp8.scaled_mm").candidates(codes.device, FNUZ).accepted
        assert (first.backend, first.kernel.forward) == (BACKEND.name, "kpt_backend_amd.scaled_mm:forward")
        assert first.refusal(made) is None
        assert "gfx942 multiplies float8_e4m3fnuz" in str(first.refusal(made._replace(a=codes.to(FN))))
    finally:
        scaled_mm._chip.cache_clear()
        get_op("fp8.scaled_mm").forget()
