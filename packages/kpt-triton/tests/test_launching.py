import pytest
import torch

from kpt_triton import launching
from kpt_triton.launching import inner_contiguous, precision, programs, rows_descriptor
from kpt_triton.tile import Tile

TILE = Tile(16, 32, 16, descriptors=True)


def test_programs_are_as_many_as_run_together_and_never_more_than_tiles(monkeypatch):
    """The number of processors is simulated."""
    monkeypatch.setattr(launching, "_processors", lambda device: 100)
    device = torch.device("cpu")
    assert [programs(device, tiles, 8) for tiles in (0, 1, 150, 10**6)] == [1, 1, 150, 200]
    assert [programs(device, 10**6, warps) for warps in (4, 16, 32)] == [400, 100, 100]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (lambda: torch.empty(40, 24), True),
        (lambda: torch.empty(40, 28)[:, :24], True),
        (lambda: torch.empty(40, 28)[:, 4:], True),
        (lambda: torch.empty(40, 25)[:, 1:], False),
        (lambda: torch.empty(40, 28)[:, 1:25], False),
        (lambda: torch.empty(40, 23), False),
        (lambda: torch.empty(1, 24).expand(40, 24), False),
        (lambda: torch.empty(0, 24), False),
        (lambda: torch.empty(40, 0), False),
        (lambda: torch.empty(40, 24, dtype=torch.float16), True),
        (lambda: torch.empty(40, 12, dtype=torch.float16), False),
    ],
)
def test_rows_have_a_descriptor_only_where_they_are_aligned_and_apart(rows, found):
    descriptor = rows_descriptor(rows(), TILE)
    assert (descriptor is not None) == found
    if found:
        assert (descriptor.shape, descriptor.block_shape) == (list(rows().shape), [16, 16])
    assert rows_descriptor(rows(), Tile(16, 32, 16)) is None


def test_more_rows_than_32_bits_count_have_no_descriptor():
    assert rows_descriptor(torch.empty(2**31 - 1, 16, device="meta"), TILE) is not None
    assert rows_descriptor(torch.empty(2**31, 16, device="meta"), TILE) is None


def test_only_what_is_not_contiguous_inside_is_copied():
    x = torch.randn(6, 8)
    for same in (x, x[::2], x[:, 2:5], x[:1].expand(6, 8), x[:, ::8]):
        assert inner_contiguous(same) is same
    for other in (x.T, x[:, ::2], x[:, :1].expand(6, 8)):
        assert inner_contiguous(other).is_contiguous()
        assert torch.equal(inner_contiguous(other), other)


@pytest.fixture
def matmul():
    """torch's settings, put back afterwards."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision if hasattr(settings, "fp32_precision") else settings.allow_tf32
    yield settings
    if hasattr(settings, "fp32_precision"):
        settings.fp32_precision = before
    else:
        settings.allow_tf32 = before


@pytest.mark.skipif(torch.version.hip is not None, reason="TF32 is NVIDIA's")
def test_float32_is_multiplied_as_torchs_setting_says(matmul):
    x = torch.empty(1)
    for allowed, name in ((True, "tf32"), (False, "ieee")):
        matmul.allow_tf32 = allowed
        assert precision(x) == name
    for level, name in (("high", "tf32"), ("highest", "ieee")):
        torch.set_float32_matmul_precision(level)
        assert precision(x) == name
        assert precision(x.half()) == precision(x.bfloat16()) == "ieee"
