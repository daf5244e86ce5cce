import pytest
import torch
from calls import grouped_mm
from hypothesis import given, settings
from hypothesis import strategies as st
from in_float64 import SMALL, SMALL_BY_DESCRIPTORS, assert_sums, ends, wide
from in_float64 import grouped_mm as reference

from kpt_triton import launching
from kpt_triton.launching import rows_descriptor
from kpt_triton.moe.grouped_mm import multiply
from kpt_triton.moe.launching import weight_descriptor
from kpt_triton.tile import Tile

NAN = float("nan")
#: rows of each expert, rows of nobody, K, N.
CASES = {
    "uneven": ([5, 0, 17, 1], 3, 40, 24),
    "whole tiles": ([16, 32], 0, 32, 16),
    "odd sizes": ([3, 18], 2, 7, 19),
    "nobody has rows": ([0, 0, 0], 4, 8, 8),
    "one row": ([1], 0, 1, 1),
    "no K": ([7], 1, 0, 5),
    "no rows": ([0, 0], 0, 8, 8),
    "no N": ([3, 2], 1, 8, 0),
    "no experts": ([], 5, 8, 8),
}
TILES = [SMALL, SMALL_BY_DESCRIPTORS, "32x16x32 w4 s2 g1", ""]


def make(loads, rest, inner, columns, device, dtype=torch.float32, layout="KN"):
    """Rows of nobody hold NaN."""
    rows = sum(loads)
    x = torch.randn(rows + rest, inner)
    x[rows:] = NAN
    weight = torch.randn(len(loads), inner, columns).to(device, dtype)
    if layout == "NK":
        weight = weight.mT.contiguous().mT
    return x.to(device, dtype), weight, ends(loads, device)


def check(out, x, weight, offsets):
    x, weight = wide(x), wide(weight)
    assert_sums(out, reference(x, weight, offsets), reference(x.abs(), weight.abs(), offsets), x.shape[1])


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("case", CASES)
def test_each_row_is_multiplied_by_its_experts_matrix(case, layout, tile, device):
    x, weight, offsets = make(*CASES[case], device, layout=layout)
    out = grouped_mm(x, weight, offsets, tile=tile)
    assert (out.shape, out.dtype) == ((x.shape[0], weight.shape[2]), x.dtype)
    check(out, x, weight, offsets)


@pytest.mark.parametrize("tile", [SMALL, SMALL_BY_DESCRIPTORS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_summed_in_float32_and_rounded_once(dtype, tile, device):
    x, weight, offsets = make([5, 0, 17, 1], 3, 40, 24, device, dtype)
    check(grouped_mm(x, weight, offsets, tile=tile), x, weight, offsets)


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 37), max_size=5), st.integers(0, 5), st.integers(0, 40), st.integers(1, 40),
    st.sampled_from(TILES), st.sampled_from(["NK", "KN"]),
)  # fmt: skip
def test_any_load_and_size(loads, rest, inner, columns, tile, layout):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, weight, offsets = make(loads, rest, inner, columns, device, layout=layout)
    check(grouped_mm(x, weight, offsets, tile=tile), x, weight, offsets)


@pytest.mark.parametrize("tile", [SMALL, SMALL_BY_DESCRIPTORS])
@pytest.mark.parametrize("kind", ["expanded", "transposed", "misaligned", "every other row", "weights strided"])
def test_strides_and_addresses_do_not_matter(kind, tile, device):
    x, weight, offsets = make([9, 0, 4], 0, 24, 20, device)
    if kind == "expanded":
        x = x[:1].expand(13, 24)
    elif kind == "transposed":
        x = x.T.contiguous().T
    elif kind == "misaligned":
        x = torch.nn.functional.pad(x, (1, 0))[:, 1:]
    elif kind == "every other row":
        x = x.repeat_interleave(2, 0)[::2]
    else:
        weight = torch.stack([weight, weight], -1)[..., 0].permute(1, 0, 2).contiguous().permute(1, 0, 2)
    assert torch.equal(
        grouped_mm(x, weight, offsets, tile=tile), grouped_mm(x.contiguous(), weight.contiguous(), offsets, tile=SMALL)
    )


def test_offsets_may_be_strided(device):
    x, weight, offsets = make([9, 0, 4], 1, 8, 8, device)
    check(grouped_mm(x, weight, offsets.repeat_interleave(2)[::2], tile=SMALL), x, weight, offsets)


@pytest.mark.parametrize("tile", [SMALL, SMALL_BY_DESCRIPTORS])
@pytest.mark.parametrize("inner", [16, 24])
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("expert", [0, 1, 2, 3])
def test_no_number_of_another_expert_is_looked_at(expert, layout, inner, tile, device):
    x, weight, offsets = make([5, 0, 6, 3], 2, inner, 24, device, layout=layout)
    want = grouped_mm(x, weight, offsets, tile=tile)
    start, end = [0, *offsets.tolist()][expert : expert + 2]
    x[start:end] = NAN
    weight[expert] = NAN
    got = grouped_mm(x, weight, offsets, tile=tile)
    assert got[start:end].isnan().all()
    got[start:end] = want[start:end]
    assert torch.equal(got, want)


# NumPy, in which the interpreter multiplies, warns.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_nan_and_infinity_of_a_row_stay_in_it(device):
    x, weight, offsets = make([5, 6], 0, 24, 24, device)
    want = grouped_mm(x, weight, offsets, tile=SMALL)
    x[2, 3], x[7, 20] = NAN, float("inf")
    got = grouped_mm(x, weight, offsets, tile=SMALL)
    assert got[2].isnan().all()
    assert not got[7].isfinite().any()
    untouched = [0, 1, 3, 4, 5, 6, 8, 9, 10]
    assert torch.equal(got[untouched], want[untouched])


@pytest.mark.parametrize(("layout", "inner", "used"), [("NK", 24, "NK"), ("KN", 32, "KN"), ("KN", 24, "")])
def test_matrices_are_read_by_descriptors_where_the_tile_says_so(layout, inner, used, device):
    x, weight, _ = make([9, 4], 0, inner, 24, device, layout=layout)
    tile = Tile.parse(SMALL_BY_DESCRIPTORS)
    assert weight_descriptor(weight, tile, tile.n)[1] == used
    assert rows_descriptor(x, tile) is not None
    assert weight_descriptor(weight, Tile.parse(SMALL), tile.n)[1] == ""


@pytest.mark.parametrize("group", [1, 2, 8])
def test_results_do_not_depend_on_how_many_programs_share_the_tiles(group, device, monkeypatch):
    x, weight, offsets = make([5, 0, 37, 1, 20], 4, 40, 40, device)
    results = []
    for processors in (1, 2, 5, 1000):
        monkeypatch.setattr(launching, "_processors", lambda device, found=processors: found)
        assert launching.programs(device, 30, 16) == min(processors, 30)
        results.append(grouped_mm(x, weight, offsets, tile=f"16x16x16 w16 s1 g{group}"))
    check(results[0], x, weight, offsets)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_gradients_are_those_of_float64(needed, layout, device):
    x, weight, offsets = make([5, 0, 17, 1], 3, 20, 12, device, layout=layout)
    x[offsets[-1] :] = 0
    grad = torch.randn(x.shape[0], 12, device=device)
    tensors = [t.requires_grad_(wanted) for t, wanted in zip((x, weight), needed, strict=True)]
    grouped_mm(x, weight, offsets, tile=SMALL).backward(grad)
    exact = [wide(t).requires_grad_(wanted) for t, wanted in zip(tensors, needed, strict=True)]
    reference(*exact, offsets).backward(wide(grad))
    for got, want, length in zip(tensors, exact, (12, 17), strict=True):
        if want.grad is None:
            assert got.grad is None
            continue
        # Numbers of order 1: the sum of magnitudes is below a few times the length.
        assert_sums(got.grad, want.grad, torch.full_like(want.grad, 4.0 * length), length)
        assert got.grad.stride() == got.stride()


def test_the_gradient_may_be_expanded(device):
    x, weight, offsets = make([5, 3], 1, 20, 12, device)
    grouped_mm(x.requires_grad_(), weight, offsets).sum().backward()
    want = grouped_mm(torch.ones(9, 12, device=device), weight.mT, offsets)
    assert torch.equal(x.grad, want)


@pytest.mark.parametrize("zero_rest", [False, True])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_gather_bias_and_weights(gather, weighted, biased, zero_rest, device):
    """Rows of nobody have NaN for weights, and stay as they are or become zero."""
    loads, rest, top_k = [7, 0, 11, 1], 5, 3
    pairs = sum(loads) + rest
    x, weight, offsets = make(loads, rest, 20, 12, device)
    order = torch.randperm(pairs).int().to(device)
    if gather:
        x = torch.randn(pairs // top_k, 20, device=device)
    bias = torch.randn(4, 12, device=device) if biased else None
    weights = torch.rand(pairs, device=device)
    weights[order[-rest:].long()] = NAN
    out = multiply(
        x,
        weight,
        offsets,
        Tile.parse(SMALL),
        order=order,
        top_k=top_k,
        gather=gather,
        bias=bias,
        weights=weights if weighted else None,
        out_dtype=torch.float16,
        zero_rest=zero_rest,
    )
    assert out.dtype is torch.float16
    sorted_x = wide(x[order.long() // top_k] if gather else x)
    want = reference(sorted_x, wide(weight), offsets)
    magnitude = reference(sorted_x.abs(), wide(weight).abs(), offsets)
    owned = sum(loads)
    if biased:
        added = wide(bias).repeat_interleave(torch.tensor(loads), 0)
        want[:owned] += added
        magnitude[:owned] += added.abs()
    if weighted:
        factors = wide(weights)[order.long().cpu()][:owned, None]
        want[:owned] *= factors
        magnitude[:owned] *= factors
    assert_sums(out[:owned], want[:owned], magnitude[:owned], 20)
    if zero_rest:
        assert (out[owned:] == 0).all()


def test_rows_of_nobody_are_left_alone_unless_zeros_are_wanted(device, monkeypatch):
    x, weight, offsets = make([3, 2], 4, 8, 8, device)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size, **options: self.new_full(size, 7.0, **options))
    assert (multiply(x, weight, offsets, Tile.parse(SMALL))[5:] == 7).all()
