"""What must be true of the model whatever its constants are, and that it is near what was published."""

import random
from dataclasses import replace

import pytest

from kpt_triton.moe.roofline import Compiled, Processor, Product, predicted_seconds
from kpt_triton.moe.roofline import _expected_pieces as expected_pieces
from kpt_triton.tile import Tile

HOPPER = Processor(
    chip="sm90",
    multiprocessors=132,
    flop_per_cycle=4096,
    peak=989e12,
    bandwidth=3.35e12,
    l2_bytes=50 * 2**20,
    l2_bandwidth=7.7e12,
    l2_latency=150e-9,
    memory_latency=480e-9,
)
AMPERE = replace(HOPPER, chip="sm80", multiprocessors=108, flop_per_cycle=2048, peak=312e12, bandwidth=2e12)
BLACKWELL = replace(HOPPER, chip="sm100", multiprocessors=148, flop_per_cycle=8192, peak=2250e12, bandwidth=8e12)
TALL, LOW = Tile(128, 128, 64, 8, 3), Tile(16, 64, 128, 4, 4, 1)
COMPILED = Compiled(occupancy=8)
KINDS = ("plain", "crowded", "pair", "slope", "wgrad")


def product(
    kind: str = "plain", rows: int = 8192, experts: int = 64, inner: int = 2048, columns: int = 1536
) -> Product:
    return Product(kind=kind, rows=rows, experts=experts, inner=inner, columns=columns)


def some(seed: int) -> tuple[Product, Tile, Compiled]:
    """Any product and tile."""
    one = random.Random(seed)
    tile = Tile(
        one.choice([16, 32, 64, 128]), one.choice([32, 64, 128, 256]), one.choice([32, 64, 128]), one.choice([4, 8]),
        one.randint(2, 5), one.choice([1, 8]),
    )  # fmt: skip
    sizes = {
        "rows": one.choice([1, 7, 200, 5000, 131072]),
        "experts": one.choice([1, 8, 128]),
        "inner": one.choice([512, 2048, 14336]),
        "columns": one.choice([768, 4096]),
    }
    return product(one.choice(KINDS), **sizes), tile, Compiled(occupancy=one.choice([8, 16, 24]))


FASTER = {
    "memory bandwidth": lambda p: replace(p, bandwidth=2 * p.bandwidth),
    "L2 bandwidth": lambda p: replace(p, l2_bandwidth=2 * p.l2_bandwidth),
    "L2 size": lambda p: replace(p, l2_bytes=2 * p.l2_bytes),
    "peak": lambda p: replace(p, peak=2 * p.peak),
    "latency": lambda p: replace(p, l2_latency=p.l2_latency / 2, memory_latency=p.memory_latency / 2),
}


@pytest.mark.parametrize("better", FASTER)
@pytest.mark.parametrize("processor", [AMPERE, HOPPER, BLACKWELL], ids=lambda processor: processor.chip)
def test_a_better_processor_is_never_slower(better, processor):
    gains = []
    for seed in range(200):
        call = some(seed)
        gains.append(predicted_seconds(*call, processor) / predicted_seconds(*call, FASTER[better](processor)))
    assert min(gains) >= 1 - 1e-9
    assert max(gains) > 1.001  # it matters somewhere


@pytest.mark.parametrize("processor", [AMPERE, HOPPER, BLACKWELL], ids=lambda processor: processor.chip)
def test_spills_never_help_and_sometimes_hurt(processor):
    losses = []
    for seed in range(60):
        call = some(seed)
        spilled = replace(call[2], spills=256)
        losses.append(predicted_seconds(*call[:2], spilled, processor) / predicted_seconds(*call, processor))
    assert min(losses) >= 1
    assert max(losses) > 1.05


@pytest.mark.parametrize("kind", KINDS)
def test_more_work_takes_longer(kind):
    for name in ("rows", "inner", "columns"):
        sizes = {"rows": 8192, "inner": 2048, "columns": 1536}
        more = sizes | {name: 2 * sizes[name]}
        short, long = (predicted_seconds(product(kind, **s), TALL, COMPILED, HOPPER) for s in (sizes, more))
        assert long > short


def test_a_tile_taller_than_the_rows_wastes_what_is_too_tall():
    """Where the matrix unit is what takes time: bandwidths are beyond limit."""
    endless = replace(HOPPER, chip="sm80", bandwidth=1e18, l2_bandwidth=1e18, l2_latency=0.0, memory_latency=0.0)
    taken = {
        height: predicted_seconds(
            product(rows=16, experts=1, inner=65536, columns=132 * 64), Tile(height, 64, 64, 4, 3), COMPILED, endless
        )
        for height in (16, 32, 64, 128)
    }
    assert sorted(taken.values()) == list(taken.values())
    assert taken[128] > 2 * taken[16]


def test_a_larger_tile_asks_less_of_the_l2_cache():
    slow = replace(HOPPER, l2_bandwidth=1e12)
    small, large = (
        predicted_seconds(product(rows=65536), tile, COMPILED, slow)
        for tile in (Tile(64, 64, 64), Tile(128, 256, 64, 8))
    )
    assert small > 2 * large


def test_stages_hide_latency_and_a_second_block_does_too():
    far = replace(HOPPER, l2_latency=2e-6, memory_latency=4e-6)
    one, two, four = (
        predicted_seconds(product(rows=65536), replace(TALL, stages=stages), COMPILED, far) for stages in (2, 3, 5)
    )
    assert one > two > four
    assert one > predicted_seconds(product(rows=65536), replace(TALL, stages=2), Compiled(occupancy=16), far)


def test_no_more_blocks_run_beside_each_other_than_are_started():
    """`programs` starts 16 warps for each multiprocessor."""
    far = replace(HOPPER, l2_latency=2e-6, memory_latency=4e-6)
    two, many = (predicted_seconds(product(rows=65536), TALL, Compiled(occupancy=warps), far) for warps in (16, 64))
    assert two == many


def test_a_wave_that_is_begun_takes_its_time():
    """132 tiles of 128 by 128 fill the multiprocessors once; one column of tiles more begins a second wave."""
    alone = replace(HOPPER, bandwidth=1e18)
    fits, over = (
        predicted_seconds(product(rows=128, experts=1, inner=8192, columns=128 * n), TALL, COMPILED, alone)
        for n in (132, 133)
    )
    assert over > 1.5 * fits


def test_memory_bounds_the_decoding_of_few_tokens():
    """Weights of the experts that have rows are read once, so nothing can be faster than that."""
    few = product(rows=8, experts=128)
    experts = expected_pieces(8, 128, 8) * 128
    assert 7 < experts < 8  # two of eight rows may choose the same
    least = experts * 2048 * 1536 * 2 / HOPPER.bandwidth
    assert least < predicted_seconds(few, LOW, COMPILED, HOPPER) < 2 * least


def test_rows_of_one_band_share_the_weights_and_others_read_them_again():
    """An expert of 256 rows has 16 tiles of 16; its weights are larger than the L2 cache."""
    large = product(rows=2048, experts=8, inner=4096, columns=28672)
    alone, together = (
        predicted_seconds(large, replace(LOW, group=group), Compiled(occupancy=16), HOPPER) for group in (1, 16)
    )
    assert alone > 2 * together


@pytest.mark.parametrize(("rows", "experts", "height"), [(64, 8, 16), (1000, 8, 64), (5, 128, 16), (4096, 32, 128)])
def test_pieces_are_those_of_rows_that_choose_at_random(rows, experts, height):
    draw = random.Random(0)
    turns, total = 400, 0
    for _ in range(turns):
        counts = [0] * experts
        for _ in range(rows):
            counts[draw.randrange(experts)] += 1
        total += sum(-(-count // height) for count in counts)
    assert expected_pieces(rows, experts, height) == pytest.approx(total / turns / experts, rel=0.03)


def test_nothing_to_compute_is_a_launch():
    assert predicted_seconds(product(rows=0), TALL, COMPILED, HOPPER) == predicted_seconds(
        product(experts=0), TALL, COMPILED, HOPPER
    )


def test_it_is_near_what_was_published_of_an_h100():
    """Experts of Qwen3-30B forward: Liger's Triton kernels are said to reach 501 TFLOP/s (Liger-Kernel, pull 1294)."""
    rows, experts = 8 * 16384, 128
    up = Product(kind="pair", rows=rows, experts=experts, inner=2048, columns=768, top_k=8)
    down = Product(kind="plain", rows=rows, experts=experts, inner=768, columns=2048)
    seconds = predicted_seconds(up, Tile(128, 64, 64, 8, 3), COMPILED, HOPPER) + predicted_seconds(
        down, Tile(128, 256, 64, 8, 3), COMPILED, HOPPER
    )
    assert 350e12 < (up.flop + down.flop) / seconds < 650e12
