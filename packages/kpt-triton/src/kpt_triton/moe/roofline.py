"""How long a grouped product should take with a tile: a model of occupancy, waves and bandwidths.

A multiprocessor holds as many blocks as registers and shared memory allow. Each block computes a tile in steps, and a
step takes as long as the slowest of: the matrix unit, shared memory, the block's share of the L2 cache, and the latency
of a load, which `stages - 1` steps together have to hide (Little's law). Blocks beside each other share all but the
latency. Tiles come in waves, the last of which may be partly filled. No product is faster than memory delivers its
operands once, or as often as the order of tiles asks for them.

Rows are taken to be routed evenly and at random, so that the last tile of each expert is partly filled; that is where
tiles that are too tall lose. Real routing is more skewed.

What the model doesn't know: bank conflicts, clocks that fall under load, the scheduler's order, what a prologue hides,
the cost of computing addresses, and that descriptors spare it. So it can't tell tiles apart that differ in that alone,
and figures here that are estimates should be varied before a choice is believed.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from kpt_triton.tile import Tile

#: Bytes that the shared memory of a multiprocessor delivers in a cycle: 32 banks of 4 bytes (CUDA C++ Programming
#: Guide, "Shared Memory" of each compute capability).
_SHARED_PER_CYCLE = 128
#: Bytes that a multiprocessor can receive from the L2 cache in a cycle (NVIDIA A100 white paper; taken for all chips).
_L2_PER_CYCLE = 64
#: Which share of the data sheet's peaks good dense products and copies reach. Estimated, and alike for all tiles.
_ATTAINABLE = 0.85
#: Seconds that a launch takes beside the work. Estimated; without it, gains on small products would look larger.
_LAUNCH = 5e-6
#: Which share of the peak `mma.sync` has where larger instructions exist. Estimated: for sm90 near what arXiv
#: 2402.13499 reports of H100, for sm100 rather too high, for low tiles are not to be left without cause.
_MMA_SYNC = {"sm90": 0.62, "sm100": 0.5}
_BYTES = 2
#: Numbers that are read or written for one of a result in the end: `pair` writes gate and up and what they give, as
#: training does; `slope` reads gate and up, writes both gradients and the weighted activation.
_AT_THE_END = {"plain": 1, "crowded": 1, "pair": 3, "slope": 5, "wgrad": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """A device, as far as the model knows it.

    Attributes:
        chip: as in `sm90`.
        multiprocessors: how many there are.
        flop_per_cycle: of the matrix units of one of them, dense 16-bit numbers with float32 sums.
        peak: of all of them, FLOP/s.
        bandwidth: of memory, bytes/s.
        l2_bytes: size of the L2 cache.
        l2_bandwidth: what it delivers, bytes/s.
        l2_latency: of a load that it has, seconds.
        memory_latency: of one that it has not.
    """

    chip: str
    multiprocessors: int
    flop_per_cycle: int
    peak: float
    bandwidth: float
    l2_bytes: float
    l2_bandwidth: float
    l2_latency: float
    memory_latency: float

    @property
    def clock(self) -> float:
        """Cycles per second at which the peak is stated."""
        return self.peak / (self.multiprocessors * self.flop_per_cycle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A grouped product of 16-bit numbers.

    Attributes:
        kind: one of `kpt_triton.moe.tiles.PRODUCTS`.
        rows: of all experts together.
        experts: how many there are.
        inner: the inner size K; for `wgrad` the columns of x.
        columns: the columns N; for `pair` those of the activation, half of what is multiplied.
        top_k: how many rows share one of x, which is gathered.
    """

    kind: str
    rows: int
    experts: int
    inner: int
    columns: int
    top_k: int = 1

    @property
    def flop(self) -> int:
        """Operations, without what partly filled tiles waste."""
        return 2 * self.rows * self.inner * self.columns * (2 if self.kind == "pair" else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler made of a kernel with a tile.

    Attributes:
        occupancy: warps that a multiprocessor holds at once.
        spills: bytes that one thread writes to memory for lack of registers.
    """

    occupancy: int
    spills: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What a product is cut into.

    Attributes:
        tiles: how many.
        steps: of a tile.
        columns: loaded in a step, beside the rows m.
        end: bytes read and written after the steps of a tile.
        memory: bytes that the whole product moves from and to memory.
    """

    tiles: int
    steps: float
    columns: int
    end: float
    memory: float


def predicted_seconds(product: Product, tile: Tile, compiled: Compiled, processor: Processor) -> float:
    """The seconds that a product should take.

    Args:
        product: what is computed.
        tile: how it is cut.
        compiled: what became of it.
        processor: where it runs.
    """
    if product.rows == 0 or product.experts == 0:
        return _LAUNCH
    work = _cut(product, tile, processor)
    at_once = min(work.tiles, processor.multiprocessors)
    share = min(processor.l2_bandwidth / at_once, _L2_PER_CYCLE * processor.clock)
    loaded = (tile.m + work.columns) * tile.k * _BYTES
    spilled = 2 * compiled.spills * 32 * tile.warps
    step = max(
        _multiplying(product, tile, processor),
        (_shared_bytes(product, tile, processor) + spilled) / (_SHARED_PER_CYCLE * processor.clock),
        loaded / share,
    )
    cold = min(1.0, work.memory / (work.tiles * (work.steps * loaded + work.end)))
    latency = processor.l2_latency + cold * (processor.memory_latency - processor.l2_latency)
    end = work.end / share
    alone = latency + work.steps * max(step, latency / max(tile.stages - 1, 1)) + end
    busy = work.steps * step + end
    # As `kpt_triton.moe.launching.programs` has it, no more than 16 warps of a multiprocessor are started.
    blocks = max(1, min(compiled.occupancy // tile.warps, 16 // tile.warps))
    waves, rest = divmod(work.tiles, processor.multiprocessors * blocks)
    computing = waves * max(alone, blocks * busy)
    if rest:
        computing += max(alone, math.ceil(rest / processor.multiprocessors) * busy)
    return _LAUNCH + max(computing, work.memory / (processor.bandwidth * _ATTAINABLE))


def _cut(product: Product, tile: Tile, processor: Processor) -> _Work:
    rows, experts, inner, columns = product.rows, product.experts, product.inner, product.columns
    across = math.ceil(columns / tile.n)
    end = tile.m * tile.n * _AT_THE_END[product.kind] * _BYTES
    if product.kind == "wgrad":
        down = math.ceil(inner / tile.m)
        moved = rows * (inner / product.top_k + columns) + experts * inner * columns
        steps = _expected_pieces(rows, experts, tile.k)
        return _Work(tiles=experts * down * across, steps=steps, columns=tile.n, end=end, memory=moved * _BYTES)
    twice = 2 if product.kind == "pair" else 1
    weight = inner * columns * twice * _BYTES
    high = experts * _expected_pieces(rows, experts, tile.m)
    reads = taking = experts * _expected_pieces(rows, experts, rows)
    if weight > processor.l2_bytes / 2:
        # A band of tiles walks along all columns; what the cache does not hold till the next band is read again.
        reads += (high - taking) / tile.group
    activations = rows * (inner / product.top_k + columns * _AT_THE_END[product.kind]) * _BYTES
    return _Work(
        tiles=math.ceil(high) * across,
        steps=math.ceil(inner / tile.k),
        columns=tile.n * twice,
        end=end,
        memory=reads * weight + activations,
    )


@lru_cache(maxsize=65536)
def _expected_pieces(rows: int, experts: int, height: int) -> float:
    """How many pieces of `height` rows an expert has on average, if each row chooses one at random."""
    if experts == 1:
        return math.ceil(rows / height)
    chance = 1 / experts
    mean = rows * chance
    reach = 12 * math.sqrt(mean) + 12
    total = 0.0
    for count in range(max(1, int(mean - reach)), min(rows, int(mean + reach)) + 1):
        ways = math.lgamma(rows + 1) - math.lgamma(count + 1) - math.lgamma(rows - count + 1)
        total += math.exp(ways + count * math.log(chance) + (rows - count) * math.log1p(-chance)) * -(-count // height)
    return total


def _instruction(tile: Tile, chip: str) -> str:
    """Which instruction multiplies, as the contracts of `kpt_triton.moe.contracts` have it."""
    return {"sm90": "wgmma", "sm100": "tcgen05"}.get(chip, "mma.sync") if tile.m >= 64 else "mma.sync"


def _multiplying(product: Product, tile: Tile, processor: Processor) -> float:
    """Seconds of the matrix unit for a step."""
    instruction = _instruction(tile, processor.chip)
    share = _MMA_SYNC.get(processor.chip, 1.0) if instruction == "mma.sync" else 1.0
    if instruction == "tcgen05" and tile.m < 128:
        share = tile.m / 128  # it multiplies 128 rows in the time of 64
    flop = 2 * tile.m * tile.n * tile.k * (2 if product.kind == "pair" else 1)
    return flop / (processor.flop_per_cycle * processor.clock * _ATTAINABLE * share)


def _shared_bytes(product: Product, tile: Tile, processor: Processor) -> float:
    """Bytes of shared memory that a step writes and reads: each part of a tile reads its own rows and columns."""
    products = 2 if product.kind == "pair" else 1
    written = tile.m + products * tile.n
    instruction = _instruction(tile, processor.chip)
    if instruction == "tcgen05":
        parts, least = 1, tile.m
    elif instruction == "wgmma":
        parts, least = max(tile.warps // 4, 1), 64  # four warps multiply together
    else:
        parts, least = tile.warps, 16
    heights = [1 << power for power in range(parts.bit_length()) if tile.m >= least << power] or [1]
    read = products * min(tile.m * (parts // high) + tile.n * high for high in heights)
    return (written + read) * tile.k * _BYTES
