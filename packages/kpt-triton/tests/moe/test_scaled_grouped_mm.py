import pytest
import torch
from calls import scaled_grouped_mm
from hypothesis import given, settings
from hypothesis import strategies as st
from in_float64 import SMALL, SMALL_BY_DESCRIPTORS, assert_sums, blocks_of_scale, ends, grouped_mm, wide

from kpt_triton.moe import grouped_mm as grouped_mm_module
from kpt_triton.moe import tiles

NAN = float("nan")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def blocks(size):
    return -(-size // 128)


def make(loads, rest, inner, columns, scales_of, device, weight_dtype=E4M3, layout="NK"):
    """Rows of nobody hold NaN; scales range over two powers of ten."""
    x = torch.randn(sum(loads) + rest, inner)
    x[sum(loads) :] = NAN
    weight = torch.randn(len(loads), inner, columns)
    weight = (weight.mT.contiguous().to(weight_dtype).mT if layout == "NK" else weight.to(weight_dtype)).to(device)
    shape = {"n": (columns,), "1n": (1, columns), "k": (inner, 1), "block": (blocks(inner), blocks(columns))}[scales_of]
    scale = 10 ** (2 * torch.rand(len(loads), *shape) - 1)
    return x.to(device), weight, scale.to(device), ends(loads, device)


def check(out, x, weight, scale, offsets, x_scale=None):
    x, weight, scale = wide(x.float()), wide(weight.float()), wide(scale)
    scale = scale.unsqueeze(1) if scale.dim() == 2 else scale
    weight = weight * blocks_of_scale(scale, *weight.shape[1:])
    if x_scale is not None:
        x = x * blocks_of_scale(wide(x_scale), x.shape[1])
    want = grouped_mm(x, weight, offsets)
    # Scales of K are multiplied in two halves of bfloat16, which together have 2**-17.
    magnitude = grouped_mm(x.abs(), weight.abs(), offsets)
    assert_sums(out, want, magnitude, 128 + x.shape[1])


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize("tile", [SMALL, SMALL_BY_DESCRIPTORS, ""])
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("scales_of", ["n", "1n", "k", "block"])
def test_weights_are_what_their_scales_make_of_them(scales_of, layout, tile, device):
    x, weight, scale, offsets = make([5, 0, 7], 2, 144, 150, scales_of, device, layout=layout)
    out = scaled_grouped_mm(x, weight, scale, offsets, tile=tile)
    assert out.dtype is torch.float32
    check(out, x, weight, scale, offsets)


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize("scales_of", ["n", "k", "block"])
@pytest.mark.parametrize("weight_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes(dtype, weight_dtype, scales_of, device):
    x, weight, scale, offsets = make([5, 0, 7], 2, 24, 20, scales_of, device, weight_dtype)
    x = x.to(dtype)
    out = scaled_grouped_mm(x, weight, scale, offsets)
    assert out.dtype is dtype
    check(out, x, weight, scale, offsets)
    wider = scaled_grouped_mm(x, weight, scale.double(), offsets, out_dtype=torch.float32)
    check(wider, x, weight, scale, offsets)


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize("x_blocks", [False, True])
@pytest.mark.parametrize("scales_of", ["n", "k", "block"])
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_an_8_bit_x_has_scales_of_rows_or_blocks(x_dtype, weight_dtype, scales_of, x_blocks, device):
    """Those of rows of nobody are NaN."""
    x, weight, scale, offsets = make([5, 0, 7], 2, 144, 20, scales_of, device, weight_dtype)
    x = x.to(x_dtype)
    x_scale = 10 ** (2 * torch.rand(14, 2 if x_blocks else 1, device=device) - 1)
    x_scale[12:] = NAN
    out = scaled_grouped_mm(x, weight, scale, offsets, x_scale=x_scale, out_dtype=torch.float32)
    check(out, x, weight, scale, offsets, x_scale)
    narrow = scaled_grouped_mm(x, weight, scale, offsets, x_scale=x_scale.T.contiguous().T, tile=SMALL)
    assert narrow.dtype is torch.bfloat16
    check(narrow, x, weight, scale, offsets, x_scale)


@pytest.mark.parametrize("tile", ["", "16x256x128 w4 s1 g1", "32x32x64 w4 s1 g1 tma"])
@pytest.mark.parametrize(("scales_of", "x_blocks"), [("n", False), ("n", True), ("block", False), ("block", True)])
@pytest.mark.parametrize("chip", ["sm80", "sm90", "sm100"])
def test_codes_give_the_same_in_each_way_to_multiply_them(chip, scales_of, x_blocks, tile, device, monkeypatch):
    """Widened, added up step by step, and by the chip all along; more columns than a block of scales has, and fewer."""
    for module in (grouped_mm_module, tiles):
        monkeypatch.setattr(module, "chip_of", lambda device: chip)
    launched = []
    launch = grouped_mm_module.grouped_mm_kernel.run
    monkeypatch.setattr(
        grouped_mm_module.grouped_mm_kernel,
        "run",
        lambda *args, **options: (launched.append(options["CODES"]), launch(*args, **options)),
    )
    x, weight, scale, offsets = make([5, 0, 18], 2, 144, 144, scales_of, device)
    x_scale = 10 ** (2 * torch.rand(25, 2 if x_blocks else 1, device=device) - 1)
    out = scaled_grouped_mm(x.to(E4M3), weight, scale, offsets, x_scale=x_scale, tile=tile)
    assert launched == [{"sm80": "", "sm90": "promoted", "sm100": "native"}[chip]]
    check(out, x.to(E4M3), weight, scale, offsets, x_scale)


@pytest.mark.parametrize("scales_of", ["n", "block"])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_no_number_gives_its_row_or_column_none(code, scales_of, device):
    x, weight, scale, offsets = make([5, 6], 0, 24, 20, scales_of, device)
    x, x_scale = x.to(E4M3), torch.ones(11, 1, device=device)
    x.view(torch.uint8)[2, 3] = code
    weight.view(torch.uint8)[1, 4, 7] = code
    none = scaled_grouped_mm(x, weight, scale, offsets, x_scale=x_scale).isnan()
    assert none[2].all()
    assert none[5:, 7].all()
    assert none.sum() == 20 + 6


@pytest.mark.parametrize("scales_of", ["n", "k", "block"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_x_is_that_of_float64(dtype, scales_of, device):
    x, weight, scale, offsets = make([5, 0, 7], 2, 40, 144, scales_of, device)
    x = x.to(dtype).requires_grad_()
    grad = torch.randn(14, 144, device=device)
    scaled_grouped_mm(x, weight, scale, offsets, out_dtype=torch.float32).backward(grad)
    back = scale.unsqueeze(1).mT if scales_of == "n" else scale.mT
    assert x.grad.dtype is dtype
    check(x.grad, grad, weight.mT, back, offsets)


@settings(max_examples=12)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=3), st.integers(0, 3), st.sampled_from([1, 127, 128, 129, 257]),
    st.sampled_from([1, 127, 128, 129, 257]), st.sampled_from(["n", "k", "block"]),
    st.sampled_from(["", "32x64x128 w4 s1 g2", "16x32x64 w4 s1 g1 tma"]), st.sampled_from(["NK", "KN"]),
)  # fmt: skip
def test_sizes_around_a_block(loads, rest, inner, columns, scales_of, tile, layout):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, weight, scale, offsets = make(loads, rest, inner, columns, scales_of, device, layout=layout)
    check(scaled_grouped_mm(x, weight, scale, offsets, tile=tile), x, weight, scale, offsets)


def test_an_expert_of_nan_does_not_leak(device):
    x, weight, scale, offsets = make([5, 6], 0, 24, 20, "block", device)
    want = scaled_grouped_mm(x, weight, scale, offsets, tile=SMALL_BY_DESCRIPTORS)
    weight.view(torch.uint8)[1] = 0x7F
    scale[1] = NAN
    got = scaled_grouped_mm(x, weight, scale, offsets, tile=SMALL_BY_DESCRIPTORS)
    assert got[5:].isnan().all()
    assert torch.equal(got[:5], want[:5])


def test_a_step_may_not_go_past_a_block_of_scales(device):
    x, weight, scale, offsets = make([5], 0, 256, 16, "block", device)
    with pytest.raises(ValueError, match="k must be at most 128 with scales of blocks; got 256"):
        scaled_grouped_mm(x, weight, scale, offsets, tile="16x16x256 w4 s1")
    scale = torch.rand(1, 16, device=device)
    check(scaled_grouped_mm(x, weight, scale, offsets, tile="16x16x256 w4 s1"), x, weight, scale, offsets)
