"""Which tile a call gets where nothing was measured."""

import pytest
import torch

from kpt_triton.moe import experts as of_experts
from kpt_triton.moe import grouped_mm as of_products
from kpt_triton.moe import grouped_mm_wgrad as of_wgrad
from kpt_triton.moe.experts_forward import Gating
from kpt_triton.moe.tiles import default_tile, is_aligned


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    for module in (of_experts, of_products, of_wgrad):
        monkeypatch.setattr(module, "chip_of", lambda device: "sm90")


def tensors(rows: int, inner: int, columns: int, experts: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.empty(rows, inner, dtype=torch.bfloat16, device="meta")
    return x, x.new_empty(experts, inner, columns)


@pytest.mark.parametrize(("rows", "height"), [(0, 16), (64, 16), (65, 32), (200, 64), (257, 128), (4096, 128)])
def test_a_tile_is_as_tall_as_an_average_expert(rows, height):
    assert of_products.tile_for(*tensors(rows, 256, 256)).m == height


def test_what_takes_registers_gets_smaller_tiles():
    x, weight = tensors(4096, 256, 256)
    plain = of_products.tile_for(x, weight)
    crowded = of_products.tile_for(x, weight, "block")
    assert of_products.tile_for(x, weight, "n") == plain
    assert of_products.tile_for(x, weight, "k") == crowded
    assert crowded.m * crowded.n < plain.m * plain.n
    assert (Gating("silu").product, Gating("swiglu").product) == ("crowded", "pair")


@pytest.mark.parametrize("sizes", [(250, 256), (256, 250)])
def test_rows_that_are_not_aligned_get_small_tiles(sizes):
    assert not is_aligned(*sizes)
    x, weight = tensors(4096, *sizes)
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    unaligned = default_tile("plain", "sm90", 2, 4096, 4, aligned=False)
    assert of_products.tile_for(x, weight) == unaligned != default_tile("plain", "sm90", 2, 4096, 4)
    of_weights = of_wgrad.tile_for(x, x.new_empty(4096, sizes[1]), offsets)
    assert of_weights == default_tile("wgrad", "sm90", 2, 4096, 4, False)
    assert of_experts._tile("", "pair", x, weight, 4096) == default_tile("pair", "sm90", 2, 4096, 4, False)


def test_a_tile_that_is_written_is_taken_as_it_is():
    x, weight = tensors(4096, 250, 256)
    assert str(of_experts._tile("128x128x64 w8 s4 g8 tma", "pair", x, weight, 4096)) == "128x128x64 w8 s4 g8 tma"
