"""The kernels' side of the backend: which calls they take, what is worth measuring, and that it is obeyed."""

import pytest
import torch

import kpt_core
from kpt_backend_nvidia import BACKEND
from kpt_backend_nvidia.moe import experts as of_experts
from kpt_backend_nvidia.moe import float8
from kpt_backend_nvidia.moe import grouped_mm as of_products
from kpt_core._tuning import configured
from kpt_triton.moe import experts as library
from kpt_triton.moe.tiles import default_tile
from kpt_triton.tile import Tile

KERNELS = {kernel.op: kernel for kernel in BACKEND.kernels()}


def test_every_op_of_moe_has_a_kernel():
    assert set(KERNELS) == {name for name in kpt_core.ops() if name.startswith("moe.")}


@pytest.mark.parametrize("kernel", BACKEND.kernels(), ids=lambda kernel: kernel.op)
def test_a_kernel_asks_for_what_the_oldest_supported_chip_has(kernel):
    from kpt_backend_nvidia import capabilities_of

    assert kernel.requires <= capabilities_of((8, 0))
    assert not kernel.requires <= capabilities_of((7, 5))


def arguments(dtype: torch.dtype = torch.float32, tokens: int = 20) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    index = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(tokens)])
    return {
        "x": normal(tokens, 16),
        "top_k_index": index,
        "top_k_weights": torch.rand(tokens, 2, generator=generator),
        "gate_up_proj": normal(4, 24, 16),
        "down_proj": normal(4, 16, 12),
    }


def test_a_tuned_tile_is_the_one_that_runs(monkeypatch):
    seen = []
    real = library.multiply
    monkeypatch.setattr(library, "multiply", lambda *args, **kwargs: seen.append(args[3]) or real(*args, **kwargs))
    target = KERNELS["moe.experts"].target
    plain = of_experts.experts(**arguments())
    with configured("moe.experts", target, {"up": "", "down": "32x16x16 w4 s2 g4", "slope": "", "wgrad": ""}):
        tuned = of_experts.experts(**arguments())
    assert seen == [
        default_tile("plain", "interpreter", 4, 40, 4) if not torch.cuda.is_available() else seen[0],
        Tile(32, 16, 16, 4, 2, 4),
    ]
    torch.testing.assert_close(tuned, plain)


def test_a_tuned_tile_of_a_product_is_the_one_that_runs(monkeypatch):
    seen = []
    real = of_products.product.multiply
    monkeypatch.setattr(
        of_products.product, "multiply", lambda *args, **kwargs: seen.append(args[3]) or real(*args, **kwargs)
    )
    x, weight, offsets = torch.randn(6, 8), torch.randn(2, 8, 4), torch.tensor([2, 6], dtype=torch.int32)
    with configured("moe.grouped_mm", KERNELS["moe.grouped_mm"].target, {"tile": "16x32x16 w2 s1 g1"}):
        of_products.grouped_mm(x, weight, offsets)
    assert seen == [Tile(16, 32, 16, 2, 1, 1)]


def test_candidates_are_configurations_that_the_kernel_takes():
    inference = of_experts.configs(**arguments(torch.bfloat16))
    leaf = {**arguments(torch.bfloat16)}
    leaf["x"] = leaf["x"].requires_grad_()
    training = of_experts.configs(**leaf)
    assert len(training) > len(inference) > 0
    for config in training:
        (written,) = (tile for tile in config.values() if tile)
        assert str(Tile.parse(written)) == written
        library.ExpertsTiles(**config)
    assert {"slope", "wgrad"} == {name for c in training for name, tile in c.items() if tile} - {"up", "down"}


def test_routing_weights_in_float64_are_refused_in_a_sentence():
    call = arguments() | {"top_k_weights": torch.rand(20, 2, dtype=torch.float64)}
    assert of_experts.unsupported(**arguments()) is None
    assert "float64" in of_experts.unsupported(**call)


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_eight_bit_weights_need_a_chip_that_reads_them(capability, refused, monkeypatch):
    """CUDA is simulated: the device is asked for its compute capability, and nothing else."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    float8._too_old.cache_clear()

    class OnCuda:
        device, dtype = torch.device("cuda", 0), torch.bfloat16

    codes = torch.zeros(2, 2, dtype=torch.float8_e4m3fn)
    sentence = float8.refusal_of_float8(OnCuda(), codes)  # type: ignore[arg-type]
    assert (sentence is not None) is refused
    assert float8.refusal_of_float8(OnCuda(), torch.zeros(2)) is None  # type: ignore[arg-type]
    float8._too_old.cache_clear()
