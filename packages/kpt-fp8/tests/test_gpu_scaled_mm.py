"""`fp8.scaled_mm` by the vendor's library: which calls it takes; how it is called, by the numbers of torch on a CPU."""

import pytest
import torch

from kpt_core import get_op
from kpt_fp8 import quantize
from kpt_fp8.torch_kernels import gpu_scaled_mm

FN, E5M2, FNUZ, E5M2_FNUZ = (getattr(torch, f"float8_{name}") for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"))


def call(a=FN, b=FN, by="tensor", rows=3, inner=32, columns=48, out=torch.bfloat16, bias=None, **changes):
    x, w = torch.randn(rows, inner), torch.randn(columns, inner)
    (left, scale_a), (right, scale_b) = (quantize(t, dtype=d, granularity=by) for t, d in ((x, a), (w, b)))
    bias = None if bias is None else torch.randn(columns).to(bias)
    options = {"granularity_a": by, "granularity_b": by, "out_dtype": out}
    return get_op("fp8.scaled_mm").bind(left, right.t(), scale_a, scale_b, bias, **options)._replace(**changes)


@pytest.fixture(autouse=True)
def plain_products(monkeypatch):
    """Keep oneDNN away: on CPUs that multiply 16 bits or 8, it takes torch's op and knows no fnuz format."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


UNSUPPORTED = {
    "ocp": gpu_scaled_mm.unsupported,
    "fnuz": gpu_scaled_mm.unsupported_of_fnuz,
    "tensors": gpu_scaled_mm.unsupported_but_tensors,
    "rows": gpu_scaled_mm.unsupported_but_rows,
}


@pytest.mark.parametrize(
    ("kernel", "a", "b", "by", "refused"),
    [
        ("fnuz", FNUZ, FNUZ, "tensor", None),
        ("fnuz", E5M2_FNUZ, FNUZ, "row", None),
        ("fnuz", FN, FN, "tensor", "this kernel multiplies float8_e4m3fnuz and float8_e5m2fnuz"),
        ("fnuz", FNUZ, E5M2, "tensor", "float8_e4m3fnuz by float8_e5m2; this kernel multiplies"),
        ("ocp", FN, E5M2, "tensor", None),
        ("ocp", FN, FN, "row", None),
        ("ocp", FNUZ, FNUZ, "tensor", "this kernel multiplies float8_e4m3fn and float8_e5m2"),
        ("tensors", FN, FN, "tensor", None),
        ("tensors", FN, FN, "row", "which another kernel takes, from sm90 on"),
        ("rows", FN, FN, "row", None),
        ("rows", FN, FN, "tensor", "this kernel is for rows"),
    ],
)  # fmt: skip
def test_a_kernel_takes_its_own_numbers_and_refuses_others_in_a_sentence(kernel, a, b, by, refused):
    found = UNSUPPORTED[kernel](call(a, b, by))
    assert found is None if refused is None else refused in str(found)


@pytest.mark.parametrize(("hip", "refused"), [("6.4.1", True), ("6.5.0", False), ("7.0.0", False), (None, False)])
def test_an_older_rocm_multiplies_the_numbers_of_mi300_alone(monkeypatch, hip, refused):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert (gpu_scaled_mm.unsupported(call()) is not None) == refused
    assert gpu_scaled_mm.unsupported_of_fnuz(call(FNUZ, FNUZ)) is None


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
def test_what_the_library_does_not_do_is_refused_in_a_sentence(given, refused):
    given = dict(given)
    offset = given.pop("offset", 0)
    made = call(**given)
    if offset:
        made = made._replace(a=torch.zeros(3 * 32 + offset, dtype=torch.uint8)[offset:].view(FN).view(3, 32))
    found = gpu_scaled_mm.unsupported(made)
    assert found is None if refused is None else refused in str(found)


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [torch.bfloat16, torch.float16, torch.float32, torch.float64, None])
def test_a_bias_of_any_type_is_added_before_the_one_rounding(out, bias):
    made = call(rows=64, out=out, bias=bias)
    if bias is not None:
        made.bias.mul_(100)  # so that rounding it, or the sum twice, would show
    found = gpu_scaled_mm.forward(made)
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
    torch.testing.assert_close(gpu_scaled_mm.forward(made).double(), wanted, rtol=2**-7, atol=2**-6)
