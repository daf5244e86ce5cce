import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpt_triton.tile import Tile

sizes = st.sampled_from([16, 32, 64, 128, 256])


@given(sizes, sizes, sizes, st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 9), st.sampled_from([1, 2, 8]), st.data())
def test_what_is_written_is_read_again(m, n, k, warps, stages, group, data):
    descriptors = data.draw(st.booleans())
    specialize = descriptors and data.draw(st.booleans())
    tile = Tile(m, n, k, warps, stages, group, descriptors, specialize, data.draw(st.sampled_from([0, 32, 128, 248])))
    assert Tile.parse(str(tile)) == tile


def test_the_form_is_that_of_the_documentation():
    assert Tile.parse("128x64x32 w8 s3 g4 tma ws") == Tile(128, 64, 32, 8, 3, 4, descriptors=True, specialize=True)
    assert Tile.parse("128x64x32 w8 s3 g4 r128 tma").registers == 128
    assert Tile.parse(" 128x64x32 w8 s3 ").group == 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "128x64",
        "128x64x32",
        "128x64x32 w8",
        "128x64x32 s3 w8",
        "ax64x32 w4 s3",
        "128x64x32 w4 s3 ws tma",
        "128x64x32 w4 s3 tma r128",
    ],
)
def test_other_forms_are_refused_with_their_text(text):
    with pytest.raises(ValueError, match=f"{text!r} is no tile; expected the form"):
        Tile.parse(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"m": 8}, "m must be a power of two from 16 up; got 8"),
        ({"n": 48}, "n must be a power of two from 16 up; got 48"),
        ({"k": 0}, "k must be a power of two from 16 up; got 0"),
        ({"warps": 3}, "warps must be a power of two from 1 up; got 3"),
        ({"stages": 0}, "stages must be from 1 up; got 0"),
        ({"group": 6}, "group must be a power of two from 1 up; got 6"),
        ({"registers": 24}, "registers must be 0 or a multiple of 8 from 32 to 248; got 24"),
        ({"registers": 100}, "registers must be 0 or a multiple of 8 from 32 to 248; got 100"),
        ({"registers": 256}, "registers must be 0 or a multiple of 8 from 32 to 248; got 256"),
        ({"specialize": True}, "specialize=True needs descriptors=True; got False"),
    ],
)
def test_what_can_not_be_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        Tile(**{"m": 64, "n": 64, "k": 64} | change)


def test_the_compiler_is_told_warps_stages_and_that_products_may_be_fused_with_sums():
    assert Tile(64, 64, 64, 2, 5).options() == {"num_warps": 2, "num_stages": 5, "enable_fp_fusion": True}


def test_only_nvidia_s_compiler_is_told_of_registers(monkeypatch):
    tile = Tile(64, 64, 64, registers=128)
    for vendor in ("hip", "xpu"):
        monkeypatch.setattr("torch.version.hip", None)
        monkeypatch.setattr("torch.version.xpu", None)
        assert tile.options() == Tile(64, 64, 64).options() | {"maxnreg": 128}
        monkeypatch.setattr(f"torch.version.{vendor}", "7.0")
        assert tile.options() == Tile(64, 64, 64).options()
