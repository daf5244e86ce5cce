"""The kernels' side of the backend: which calls they take, what is worth measuring, and that it is obeyed."""

import pytest
import torch

import kpt_core
from kpt_backend_nvidia import BACKEND, capabilities_of
from kpt_core.contract import load
from kpt_triton import chips, launching
from kpt_triton.moe import configs, refusals
from kpt_triton.moe import experts as of_experts
from kpt_triton.moe import grouped_mm as of_products
from kpt_triton.moe.tiles import default_tile
from kpt_triton.tile import Tile

KERNELS = {kernel.op: kernel for kernel in BACKEND.kernels() if kernel.op.startswith("moe.")}


def test_every_op_of_moe_has_a_kernel():
    assert set(KERNELS) == {name for name in kpt_core.ops() if name.startswith("moe.")}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.op)
def test_a_kernel_asks_for_what_the_oldest_supported_chip_has_and_is_where_it_says(kernel):
    assert kernel.requires <= capabilities_of((8, 0))
    assert not kernel.requires <= capabilities_of((7, 5))
    for target in filter(None, (kernel.forward, kernel.backward, kernel.unsupported, kernel.configs)):
        assert callable(load(target))
    assert load(kernel.aot)


def call_of(dtype: torch.dtype = torch.float32, tokens: int = 20, experts: int = 4) -> kpt_core.Call:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    index = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=generator)
    matrices = normal(experts, 24, 16), normal(experts, 16, 12)
    return kpt_core.get_op("moe.experts").bind(normal(tokens, 16), index, weights, *matrices)


@pytest.fixture
def tiles(monkeypatch):
    """The tiles of the plain products that run."""
    seen = []
    for module in (of_experts, of_products):
        real = module.multiply

        def noting(*args, real=real, **kwargs):
            seen.append(args[3])
            return real(*args, **kwargs)

        monkeypatch.setattr(module, "multiply", noting)
    return seen


def test_a_tuned_tile_is_the_one_that_runs(tiles):
    call, forward = call_of(), KERNELS["moe.experts"].load()
    plain, _ = forward(call)
    tuned, _ = forward(call._replace(config={"down": "32x16x16 w4 s2 g4"}))
    if not torch.cuda.is_available():
        assert tiles[0] == default_tile("plain", "interpreter", 4, 40, 4)
    assert tiles[1:] == [Tile(32, 16, 16, 4, 2, 4)]
    torch.testing.assert_close(tuned, plain)


def test_a_tuned_tile_of_a_product_is_the_one_that_runs(tiles):
    tensors = torch.randn(6, 8), torch.randn(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
    call = kpt_core.get_op("moe.grouped_mm").bind(*tensors)
    KERNELS["moe.grouped_mm"].load()(call._replace(config={"tile": "16x32x16 w2 s1 g1"}))
    assert tiles == [Tile(16, 32, 16, 2, 1, 1)]


def test_candidates_are_configurations_that_the_kernel_takes():
    call = call_of(torch.bfloat16)
    inference, training = configs.experts(call), configs.experts(call._replace(needs=("x",)))
    assert len(training) > len(inference) > 0
    for config in training:
        (written,) = config.values()
        assert str(Tile.parse(written)) == written
    assert {"up", "down"} == {name for config in inference for name in config}
    assert {"up", "down", "slope", "wgrad"} == {name for config in training for name in config}
    assert configs.experts(call_of(tokens=1)) == []


def test_routing_weights_in_float64_are_refused_in_a_sentence():
    call = call_of()
    assert refusals.experts(call) is None
    assert "float64" in refusals.experts(call._replace(top_k_weights=call.top_k_weights.double()))


def test_more_experts_or_pairs_than_are_sorted_are_refused():
    refusal = refusals.experts(call_of(tokens=1, experts=4097))
    assert refusal == "more than 4096 experts, which this kernel does not sort"
    call = call_of()
    many = call._replace(top_k_index=torch.empty(2**29 + 1, 2, dtype=torch.int64, device="meta"))
    assert "more than 2**30 pairs" in refusals.experts(many)


def test_what_gating_does_not_take_is_refused():
    gating = kpt_core.get_op("moe.top_k_gating").bind
    assert refusals.top_k_gating(gating(torch.zeros(2, 1024), torch.zeros(1024), top_k=2)) is None
    refusal = refusals.top_k_gating(gating(torch.zeros(2, 1025), top_k=2))
    assert refusal == "more than 1024 experts, whose scores this kernel does not hold"
    assert "float64" in refusals.top_k_gating(gating(torch.zeros(2, 8), torch.zeros(8).double(), top_k=2))


@pytest.mark.parametrize("chip", [*chips.NVIDIA, *chips.AMD, *chips.INTEL, "interpreter"])
def test_eight_bit_weights_are_converted_or_handed_over_as_integers(chip, monkeypatch):
    for module in (chips, launching):
        monkeypatch.setattr(module, "chip_of", lambda device: chip)
    converts = chip in ("sm89", "sm90", "sm100", "sm120", "gfx950", "gfx1201", "interpreter")
    for dtype, kind in ((torch.float8_e4m3fn, torch.uint8), (torch.float8_e5m2, torch.int8)):
        codes = torch.zeros(2, 2, 2, dtype=dtype)
        assert launching.as_read(codes).dtype is (dtype if converts else kind)
        for x in (torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.float16)):
            call = kpt_core.get_op("moe.scaled_grouped_mm").bind(
                x, codes, torch.ones(2, 2), torch.tensor([1, 2], dtype=torch.int32)
            )
            small = chip == "gfx90a" and dtype is torch.float8_e5m2 and x.dtype is torch.float16
            assert (refusals.scaled_grouped_mm(call) is not None) is small
