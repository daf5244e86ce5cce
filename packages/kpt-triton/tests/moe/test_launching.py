from contextlib import contextmanager

import pytest
import torch
from calls import record
from hypothesis import given
from hypothesis import strategies as st
from in_float64 import ends

from kpt_triton.moe import experts, gating, grouped_mm, grouped_mm_wgrad, launching, scaled_grouped_mm
from kpt_triton.moe.launching import (
    inner_contiguous,
    most_tiles,
    padded,
    precision,
    programs,
    rows_descriptor,
    weight_descriptor,
)
from kpt_triton.tile import Tile

TILE = Tile(16, 32, 16, descriptors=True)


@given(st.lists(st.integers(0, 200), max_size=12), st.integers(0, 200), st.sampled_from([16, 32, 64, 128]))
def test_no_load_has_more_tiles_than_most_tiles_says(loads, rest, height):
    needed = sum(-(-rows // height) for rows in (*loads, rest))
    assert needed <= most_tiles(sum(loads) + rest, len(loads), height)


@pytest.mark.parametrize(("loads", "rest"), [([17, 1, 1], 1), ([1, 0, 0], 0), ([33], 17), ([0, 0], 0)])
def test_most_tiles_is_no_more_than_some_load_needs_and_one_tile_for_each_expert(loads, rest):
    rows = sum(loads) + rest
    assert most_tiles(rows, len(loads), 16) <= -(-rows // 16) + min(len(loads) + 1, rows)


@pytest.mark.parametrize("experts_here", [1, 2, 3, 4, 7, 8, 127, 128, 255])
def test_there_is_a_place_for_the_rows_of_nobody(experts_here):
    found = padded(experts_here)
    assert experts_here < found <= 2 * (experts_here + 1)
    assert found & (found - 1) == 0


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


@pytest.mark.parametrize(
    ("weight", "layout"),
    [
        (lambda: torch.empty(3, 32, 24), "KN"),
        (lambda: torch.empty(3, 24, 32).mT, "NK"),
        (lambda: torch.empty(3, 24, 36).mT, "NK"),  # K past the last whole step
        (lambda: torch.empty(3, 36, 24), ""),  # there the next expert's numbers would be read
        (lambda: torch.empty(3, 32, 23), ""),  # misaligned
        (lambda: torch.empty(3, 24, 31).mT, ""),
        (lambda: torch.empty(3, 32, 48)[..., ::2], ""),  # neither is contiguous
        (lambda: torch.empty(32, 3, 24).transpose(0, 1), ""),  # an expert's rows are not behind one another
        (lambda: torch.empty(6, 32, 24)[::2], ""),  # experts are not
        (lambda: torch.empty(1, 32, 24).expand(3, 32, 24), ""),
        (lambda: torch.empty(0, 32, 24), ""),
        (lambda: torch.empty(3, 0, 24), ""),
    ],
)
def test_matrices_have_a_descriptor_only_where_a_step_reads_one_expert_alone(weight, layout):
    operand, found = weight_descriptor(weight(), TILE, 32)
    assert found == layout
    if layout == "":
        assert isinstance(operand, torch.Tensor)
    else:
        assert operand.block_shape == ([32, 16] if layout == "NK" else [16, 32])
    assert weight_descriptor(weight(), Tile(16, 32, 16), 32)[1] == ""


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


@contextmanager
def _noted(devices, tensor):
    devices.append(tensor.data_ptr())
    yield


def test_every_kernel_launches_on_the_device_of_its_input(monkeypatch):
    """A second GPU is simulated, by what becomes the current device."""
    devices = []
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: _noted(devices, tensor))
    x, weight, offsets = torch.randn(4, 16), torch.randn(2, 16, 8), ends([1, 3], torch.device("cpu"))
    routing = {"top_k_index": torch.tensor([[0], [1], [1], [0]]), "top_k_weights": torch.ones(4, 1)}
    calls = {
        grouped_mm: {"x": x, "weight": weight, "offsets": offsets},
        grouped_mm_wgrad: {"x": x, "grad": x, "offsets": offsets},
        scaled_grouped_mm: {
            "x": x, "weight": weight.to(torch.float8_e5m2), "scale": torch.ones(2, 8), "offsets": offsets
        },
        experts: {"x": x, **routing, "gate_up_proj": weight.mT, "down_proj": weight[:, :, :4]},
        gating: {"logits": x, "top_k": 2},
    }  # fmt: skip
    for module, arguments in calls.items():
        first = next(iter(arguments))
        module.forward(record(module, **arguments))
        call = record(module, needs=(first,), **arguments)
        found = module.forward(call)
        results, saved = found if module is experts else (found, found if module is gating else ())
        grads = (torch.ones_like(results[0]), None) if module is gating else (torch.ones_like(results),)
        assert set(module.backward(call, saved, *grads)) == {first}
        assert devices == [x.data_ptr()] * 3, module
        devices.clear()
