from contextlib import contextmanager

import pytest
import torch
from calls import record
from hypothesis import given
from hypothesis import strategies as st
from in_float64 import ends

from kpt_triton.moe import experts, gating, grouped_mm, grouped_mm_wgrad, scaled_grouped_mm
from kpt_triton.moe.launching import codes_of, most_tiles, padded, weight_descriptor
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


E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz


@pytest.mark.parametrize(
    ("chip", "how"),
    [
        ("sm80", ""), ("sm86", ""), ("sm89", "promoted"), ("sm90", "promoted"), ("sm100", "native"),
        ("sm120", "promoted"), ("gfx90a", ""), ("gfx942", ""), ("gfx950", "native"), ("gfx1100", ""),
        ("gfx1201", "native"), ("pvc", ""), ("interpreter", "promoted"),
    ],
)  # fmt: skip
def test_codes_are_multiplied_as_they_are_where_a_chip_has_units_for_them(chip, how):
    def found(x=E4M3, weight=E4M3, kind="n", out=torch.bfloat16):
        return codes_of(x, weight, kind, out, chip)

    for kind in ("n", "block"):
        assert [found(kind=kind), found(x=E5M2, kind=kind), found(weight=E5M2, kind=kind)] == [how] * 3
    assert found(x=torch.bfloat16) == found(kind="k") == ""
    assert found(FNUZ, FNUZ) == ("native" if chip == "gfx942" else how if chip == "interpreter" else "")
    # Units for codes add with too few bits for these.
    exact = how if chip == "interpreter" else ""
    assert found(out=torch.float16) == found(out=torch.float32) == exact


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
