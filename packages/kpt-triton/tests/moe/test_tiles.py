"""Which tile a call gets where nothing was measured."""

import pytest
import torch

from kpt_triton.moe import tiles
from kpt_triton.moe.experts_forward import Gating
from kpt_triton.moe.tiles import default_tile, is_aligned, product_of, tile_for


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setattr(tiles, "chip_of", lambda device: "sm90")


def found(rows=4096, sizes=(256, 256), product="plain", config=None, name="tile"):
    x = torch.empty(rows, sizes[0], dtype=torch.bfloat16, device="meta")
    return tile_for(product, x, rows, (4, *sizes), config, name)


@pytest.mark.parametrize(("rows", "height"), [(0, 16), (64, 16), (65, 32), (200, 64), (257, 128), (4096, 128)])
def test_a_tile_is_as_tall_as_an_average_expert(rows, height):
    assert found(rows).m == height


def test_what_takes_registers_gets_smaller_tiles():
    plain, crowded = found(), found(product="crowded")
    assert crowded.m * crowded.n < plain.m * plain.n
    assert [product_of(kind) for kind in ("", "n", "k", "block")] == ["plain", "plain", "crowded", "crowded"]
    assert (Gating("silu").product, Gating("swiglu").product) == ("crowded", "pair")


def test_a_step_of_codes_is_as_long_as_a_scale_is_of():
    assert [product_of(kind, codes=True) for kind in ("", "n", "block")] == ["codes", "codes", "crowded_codes"]
    for rows in (1, 100, 200, 4096):
        assert found(rows=rows, product="crowded_codes").k == found(rows=rows, product="codes").k == 128


@pytest.mark.parametrize("product", ["plain", "wgrad", "pair"])
@pytest.mark.parametrize("sizes", [(250, 256), (256, 250)])
def test_rows_that_are_not_aligned_get_small_tiles(sizes, product):
    assert not is_aligned(*sizes)
    unaligned = default_tile(product, "sm90", 2, 4096, 4, aligned=False)
    assert found(sizes=sizes, product=product) == unaligned != default_tile(product, "sm90", 2, 4096, 4)


def test_a_tile_that_is_written_is_taken_as_it_is():
    config = {"up": "128x128x64 w8 s4 g8 tma", "down": ""}
    assert str(found(sizes=(250, 256), config=config, name="up")) == config["up"]
    for other in ("down", "slope"):
        assert found(config=config, name=other) == found()
