"""`fp8.quantize` and its scales, against ml_dtypes and by what they promise."""

import itertools
import math

import ml_dtypes
import numpy
import pytest
import torch
from torch import Tensor

from kpt_core import InputError, UnknownNameError, use
from kpt_fp8 import dequantize, quantize, scale_shape, stochastic
from kpt_fp8.formats import FORMATS
from kpt_fp8.stochastic import random_bits

NAMES = {dtype: getattr(ml_dtypes, str(dtype).removeprefix("torch.")) for dtype in FORMATS}
ONE = torch.ones(())


def by_ml_dtypes(x: Tensor, scale: float, dtype: torch.dtype) -> numpy.ndarray:
    """Bytes of the codes, as an independent implementation rounds them."""
    most = numpy.float32(FORMATS[dtype].most)
    with numpy.errstate(over="ignore"):
        quotient = numpy.clip(x.to(torch.float32).numpy() / numpy.float32(scale), -most, most)
    return quotient.astype(NAMES[dtype]).view(numpy.uint8)


def equal_codes(codes: Tensor, expected: numpy.ndarray, dtype: torch.dtype) -> bool:
    nans = numpy.isnan(expected.view(NAMES[dtype]).astype(numpy.float32))
    return bool(((codes.view(torch.uint8).numpy() == expected) | (nans & codes.float().isnan().numpy())).all())


def adversarial() -> Tensor:
    """Every float16 there is, so every tie of every format; denormals of float32, and its ends."""
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    near = torch.cat(
        [halves, torch.nextafter(halves, torch.tensor(math.inf)), torch.nextafter(halves, -ONE * math.inf)]
    )
    ends = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-38, 3.4e38, -3.4e38])
    return torch.cat([near, ends])


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 0.25, 1 / 3, 7e-5])
def test_rounds_as_ml_dtypes_does(dtype: torch.dtype, scale: float) -> None:
    x = torch.cat([adversarial(), torch.randn(500_000, generator=torch.Generator().manual_seed(0)) * 30])
    codes, _ = quantize(x, torch.tensor(scale), dtype=dtype)
    assert equal_codes(codes, by_ml_dtypes(x, torch.tensor(scale).item(), dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_rounded_from_float32(dtype: torch.dtype) -> None:
    x = torch.randn(4000).to(dtype)
    assert torch.equal(
        quantize(x, granularity="row")[0].view(torch.uint8), quantize(x.float(), granularity="row")[0].view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_largest_number_becomes_the_largest_of_the_format(dtype: torch.dtype) -> None:
    x = torch.randn(50, 300, generator=torch.Generator().manual_seed(1))
    for granularity in ("tensor", "row", "1x128", "128x128", "1x32"):
        codes, scale = quantize(x, dtype=dtype, granularity=granularity)
        assert list(scale.shape) == scale_shape(x.shape, granularity)
        assert codes.float().abs().max() == FORMATS[dtype].most
        error = (dequantize(codes, scale, granularity=granularity) - x).abs()
        # Half a step of the largest numbers, whatever shares the scale.
        assert error.max() <= x.abs().max() * 2.0 ** -(FORMATS[dtype].mantissa_bits + 1)


def test_scales_of_blocks_by_hand() -> None:
    x = torch.zeros(130, 200)
    x[0, 0], x[129, 199], x[5, 150] = 448.0, -896.0, 4480.0
    assert quantize(x, granularity="128x128")[1].tolist() == [[1.0, 10.0], [1.0, 2.0]]
    rows = quantize(x, granularity="1x128")[1]
    assert rows.shape == (130, 2)
    assert (rows[0, 0], rows[5, 1], rows[129, 1], rows[7, 0]) == (1.0, 10.0, 2.0, 1.0)


@pytest.mark.parametrize(
    ("amax", "up", "down"),
    [
        (448.0, 1.0, 1.0),
        (449.0, 2.0, 1.0),
        (256.0, 1.0, 1.0),
        (255.9, 1.0, 0.5),
        (1e-3, 2.0**-18, 2.0**-18),
        (3e38, 2.0**120, 2.0**119),
    ],
)
def test_powers_of_two_by_hand(amax: float, up: float, down: float) -> None:
    x = torch.tensor([[amax, 0.0]])
    for rounding, expected in (("up", up), ("down", down)):
        for dtype in (torch.float32, torch.float8_e8m0fnu):
            scale = quantize(x, granularity="1x32", scale_rounding=rounding, scale_dtype=dtype)[1]
            assert scale.float().item() == expected


def test_mx_scales_are_bytes_of_an_exponent() -> None:
    x = torch.randn(7, 100) * torch.exp2(torch.randint(-60, 60, (7, 1)).float())
    codes, scale = quantize(x, granularity="1x32", scale_dtype=torch.float8_e8m0fnu, scale_rounding="up")
    assert scale.shape == (7, 4)
    assert scale.dtype is torch.float8_e8m0fnu
    amax = torch.nn.functional.pad(x, (0, 28)).unflatten(1, (4, 32)).abs().amax(-1)
    assert torch.equal(scale.float(), torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float())
    # The bytes are those of ml_dtypes.
    expected = scale.float().numpy().astype(ml_dtypes.float8_e8m0fnu).view(numpy.uint8)
    assert (scale.view(torch.uint8).numpy() == expected).all()
    assert codes.float().abs().max() <= 448


def test_what_is_not_finite_counts_for_no_scale() -> None:
    x = torch.tensor([[1.0, math.inf, -2.0], [math.nan, 0.5, -0.25], [math.nan, math.inf, -math.inf], [0.0, -0.0, 0.0]])
    codes, scale = quantize(x, granularity="row")
    numpy.testing.assert_array_equal(scale.numpy(), numpy.float32([2 / 448, 0.5 / 448, 1, 1]))
    assert codes.float().tolist()[0] == [224.0, 448.0, -448.0]
    assert codes.float()[1, 0].isnan()
    assert codes.float()[1, 1:].tolist() == [448.0, -224.0]
    assert codes.float()[2, 1:].tolist() == [448.0, -448.0]
    assert codes[3].view(torch.uint8).tolist() == [0, 128, 0]


def test_denormal_numbers_have_a_scale_that_is_normal() -> None:
    codes, scale = quantize(torch.tensor([[1e-40, -1e-44]]), granularity="row")
    assert scale.item() == 2.0**-126
    assert codes.isnan().sum() == 0


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128", "1x32"])
def test_nothing_is_quantised_to_nothing(shape: tuple[int, int], granularity: str) -> None:
    codes, scale = quantize(torch.ones(shape), granularity=granularity)
    assert codes.shape == shape
    assert list(scale.shape) == scale_shape(shape, granularity)
    assert (scale == 1).all()


def test_stacks_of_matrices_are_quantised_each_by_itself() -> None:
    x = torch.randn(3, 130, 140)
    for granularity in ("row", "1x128", "128x128", "1x32"):
        codes, scale = quantize(x, granularity=granularity)
        for place in range(3):
            one, own = quantize(x[place], granularity=granularity)
            assert torch.equal(codes[place].view(torch.uint8), one.view(torch.uint8))
            assert torch.equal(scale[place], own)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("of", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stochastically", [False, True])
def test_nan_of_either_sign_has_one_code(dtype: torch.dtype, of: torch.dtype, stochastically: bool) -> None:
    nan = torch.full((70,), math.nan, dtype=of)
    x = torch.cat([nan, -nan, torch.tensor([math.inf], dtype=of) - math.inf, torch.ones(3, dtype=of)])
    codes, scale = quantize(x, dtype=dtype, stochastic=stochastically)
    assert codes[:-3].view(torch.uint8).unique().tolist() == [0x80 if "fnuz" in str(dtype) else 0x7F]
    assert scale == 1 / torch.tensor(FORMATS[dtype].most)


@pytest.mark.parametrize("dtype", FORMATS)
def test_zero_keeps_its_sign_where_the_format_has_one(dtype: torch.dtype) -> None:
    codes, _ = quantize(torch.tensor([-0.0, 0.0, -1e-30, 1e-30, 1.0]), ONE, dtype=dtype)
    minus = 0 if "fnuz" in str(dtype) else 0x80
    assert codes[:4].view(torch.uint8).tolist() == [minus, 0, minus, 0]


def test_a_scale_of_any_value_is_divided_by() -> None:
    x = torch.tensor([3.0, -3.0, 0.0, math.nan, math.inf])

    def by(scale: float) -> list[float]:
        return [each if each == each else "nan" for each in quantize(x, torch.tensor(scale))[0].tolist()]

    assert by(0.0) == [448.0, -448.0, "nan", "nan", 448.0]
    assert by(-1.0) == [-3.0, 3.0, 0.0, "nan", -448.0]
    assert by(math.inf) == [0.0, 0.0, 0.0, "nan", "nan"]
    assert by(math.nan) == ["nan"] * 5
    assert by(1e-45) == [448.0, -448.0, 0.0, "nan", 448.0]


@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "128x128"])
def test_results_are_contiguous_whatever_is_given(granularity: str) -> None:
    x = torch.randn(260, 256).t()
    plain = quantize(x.contiguous(), granularity=granularity)
    turned = plain[1].mT.contiguous().mT if plain[1].dim() == 2 else plain[1]
    for codes, scale in (quantize(x, granularity=granularity), quantize(x, turned, granularity=granularity)):
        assert codes.is_contiguous()
        assert scale.is_contiguous()
        assert torch.equal(codes.view(torch.uint8), plain[0].view(torch.uint8))
    for backend in ("reference", "torch"):
        with use(backend):
            assert dequantize(plain[0].t().contiguous().t(), turned, granularity=granularity).is_contiguous()


def test_the_least_scale_is_two_to_the_minus_126_in_every_dtype() -> None:
    x = torch.tensor([[1e-40, 0.0]])
    for dtype in (torch.float32, torch.float64, torch.float8_e8m0fnu):
        for rounding in ("up", "down"):
            scale = quantize(x, granularity="1x32", scale_dtype=dtype, scale_rounding=rounding)[1]
            assert scale.double().item() == 2.0**-126
    # One that is given counts as it is.
    least = torch.tensor([[2.0**-127]]).to(torch.float8_e8m0fnu)
    assert quantize(torch.tensor([[2.0**-120]]), least, granularity="1x32")[0].tolist() == [[128.0]]


def test_shapes_of_scales_are_told_or_refused() -> None:
    assert scale_shape([3, 100], "mxfp8") == [3, 4]
    with pytest.raises(UnknownNameError, match="unknown granularity 'rows': did you mean 'row'"):
        scale_shape([3, 100], "rows")
    with pytest.raises(InputError, match=r"scale_shape: shape must have 2 dimensions at least.*got \[100\]"):
        scale_shape([100], "128x128")


def _most_at_once(profile: torch.profiler.profile) -> int:
    """Bytes that were allocated and not yet freed, at most."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert max(changes) == 4 << 20
    return max(itertools.accumulate(changes))


class TestStochastic:
    """Rounding up or down at random."""

    def test_words_are_those_of_philox(self) -> None:
        # Known answers of Random123's kat_vectors for philox4x32-10: counter 0 and key 0; all bits set.
        assert random_bits(1, 0, 0, torch.device("cpu")).tolist() == [0x6627E8D5]

    @pytest.mark.parametrize("offset", [0, 2**32 - 5, 2**63 - 30])
    def test_drawing_part_by_part_gives_the_same_bits(self, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
        x = torch.randn(7, 11)
        whole = quantize(x, ONE, stochastic=True, seed=-3, offset=offset)[0]
        monkeypatch.setattr(stochastic, "_AT_ONCE", 10)
        parts = quantize(x.t().contiguous().t(), ONE, stochastic=True, seed=-3, offset=offset)[0]
        assert torch.equal(whole.view(torch.uint8), parts.view(torch.uint8))

    def test_drawing_takes_bounded_memory(self) -> None:
        x = torch.randn(1 << 20)
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            quantize(x, stochastic=True)
        assert _most_at_once(profile) <= 24 << 20

    def test_each_number_becomes_one_of_its_neighbours_and_the_mean_is_right(self) -> None:
        x = torch.tensor([1.03, -1.03, 0.001, -0.0007, 17.0, 300.0, 447.9, 0.0]).repeat(20_000)
        codes, _ = quantize(x, ONE, stochastic=True, seed=5)
        drawn = codes.float().view(-1, 8)
        for place, number in enumerate(x[:8].tolist()):
            step = 2.0 ** (max(math.frexp(number)[1] - 1, -6) - 3)
            assert ((drawn[:, place] - number).abs() < step).all()
            deviation = step / 2 / math.sqrt(len(drawn))
            assert abs(drawn[:, place].double().mean().item() - number) < 6 * deviation

    @pytest.mark.parametrize("dtype", FORMATS)
    def test_numbers_of_the_format_stay(self, dtype: torch.dtype) -> None:
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        finite = every[every.float().isfinite()]
        codes, _ = quantize(finite.float(), ONE, dtype=dtype, stochastic=True, seed=3)
        assert torch.equal(codes.view(torch.uint8), finite.view(torch.uint8))

    def test_seed_and_offset_tell_all(self) -> None:
        x = torch.randn(1000)
        first = quantize(x, ONE, stochastic=True, seed=1)[0].view(torch.uint8)
        assert torch.equal(first, quantize(x, ONE, stochastic=True, seed=1)[0].view(torch.uint8))
        assert not torch.equal(first, quantize(x, ONE, stochastic=True, seed=2)[0].view(torch.uint8))
        # The second half is what half as many numbers with a later offset are.
        later = quantize(x[500:], ONE, stochastic=True, seed=1, offset=500)[0].view(torch.uint8)
        assert torch.equal(first[500:], later)


def test_a_quantised_tensor_is_no_input() -> None:
    codes, _ = quantize(torch.ones(3))
    with pytest.raises(InputError, match=r"x must be float64.*got torch\.float8_e4m3fn"):
        quantize(codes)


def test_nothing_asks_for_a_gradient() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    codes, scale = quantize(x)
    assert not codes.requires_grad
    assert not scale.requires_grad


#: SQNR in dB of normal numbers, measured elsewhere (torch.Tensor.to on an AVX-512 Xeon).
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 31.6),
        ({"granularity": "row"}, 31.6),
        ({"granularity": "128x128"}, 31.8),
        ({"dtype": torch.float8_e5m2}, 25.6),
        ({"granularity": "1x32", "scale_rounding": "up"}, 31.5),
        ({"granularity": "1x32", "scale_rounding": "down"}, 30.6),
    ],
)
def test_noise_is_what_others_measure(settings: dict[str, object], expected: float) -> None:
    x = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    with use("torch"):
        codes, scale = quantize(x, **settings)
        got = dequantize(codes, scale, granularity=settings.get("granularity", "tensor"))
    noise = 10 * math.log10(x.double().square().sum() / (got - x).double().square().sum())
    assert abs(noise - expected) < 0.3
