"""Hold what the compiler scheduled for a tile to the chip's peaks, beside JAX's own kernels compiled in the same way.

A kernel's code for a TPU is a list of bundles, each of which takes a cycle at least. A tile of a grid runs the list
once, so that its operations over the matrix units' rate, divided by the bundles, is the share of the peak that is left
if the kernel never waits for memory: `matrix`. `memory` is the same of what a step of decoding reads. The list has the
code that only some tiles run, too (the first, the last, those with a NaN), so that the share of the others is larger;
waiting makes it smaller. No TPU ran anything. JAX's cost analysis says no more of a Pallas kernel than its author did.

    python packages/kpt-backend-tpu/benchmarks/schedules.py --json schedules.json
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kpt_backend_tpu.attention import programs as attention
from kpt_backend_tpu.chips import CHIPS, PRODUCTS, TPUS, product_of
from kpt_backend_tpu.fp8 import programs as fp8
from kpt_backend_tpu.moe import programs as moe
from kpt_backend_tpu.tiles import tile_of
from kpt_conformance.aot import tpu
from kpt_conformance.aot.chips import chip_named

#: As `kpt_backend_tpu.pallas.paged`, which can't be imported before `tpu.prepare`, has them.
KEYS, MOST_TOGETHER = 1024, 8
_TOTAL = re.compile(r"total scheduled bundles:\s+(\d+)")
_ITEMSIZE = {"bfloat16": 2, "float32": 4}
#: Products in bfloat16 that one in float32 takes.
_PASSES = {"bfloat16": 1, "float32": 6}
PREFILL = attention._SIZES["prefill"]
QUERIES, DIM = PREFILL["queries"], PREFILL["dims"][0]
PRODUCT = moe._SIZES["prefill"]


@dataclass(frozen=True)
class Share:
    """What was found of a kernel.

    Attributes:
        what: it computes.
        kernel: its name in the compiled program.
        whose: `kpt` or `jax`.
        chip: it was compiled for.
        dtype: of its operands.
        bundles: that were scheduled.
        matrix: cycles that the matrix units need for a tile, of these.
        memory: cycles that reading a tile's operands takes, of these; None where tiles share them.
    """

    what: str
    kernel: str
    whose: str
    chip: str
    dtype: str
    bundles: int
    matrix: float
    memory: float | None = None


def scheduled(lowered: Any, dump: Path) -> dict[str, int]:
    """Compile; return the bundles of each kernel."""
    for file in dump.iterdir():
        file.unlink()
    code = lowered.compile().as_text()
    found = {}
    for call in {match[1] for match in tpu._CALL.finditer(code)}:
        for file in dump.glob(f"*-{call}-*-schedule-analysis_final_bundles.txt"):
            found[call] = int(_TOTAL.search(file.read_text())[1])  # type: ignore[index]
    return found


def jax_kernels(devices: Any, dtype: str, tile: Any, width: int) -> Iterator[tuple[str, Any]]:
    """Lower JAX's own kernels for the sizes and tiles of ours; of float32 they make one pass of bfloat16."""
    if dtype == "float32":
        return
    import jax
    from jax import numpy as jnp
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    place = jax.sharding.SingleDeviceSharding(devices[0])

    def array(*shape: int, of: str = dtype) -> Any:
        form: Any = jax.ShapeDtypeStruct
        return form(shape, of, sharding=place)

    rows, groups, inner, columns = (PRODUCT[name] for name in ("rows", "groups", "inner", "columns"))
    multiply = jax.jit(
        lambda x, w, sizes: gmm(x, w, sizes, preferred_element_type=jnp.dtype(dtype), tiling=tuple(tile))
    )
    yield (
        "grouped product",
        multiply.lower(array(rows, inner), array(groups, inner, columns), array(groups, of="int32")),
    )
    mask = masks.MultiHeadMask([masks.CausalMask((QUERIES, QUERIES))] * 4)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    widths: dict[str, Any] = {f"block_{name}": width for name in names}
    sizes = splash.BlockSizes(**widths)
    one = splash.make_splash_mqa(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
    attend = jax.vmap(jax.vmap(one))
    q, k = array(2, 8, 4, QUERIES, DIM), array(2, 8, QUERIES, DIM)
    yield "attention forward", jax.jit(attend).lower(q, k, k)
    pull = jax.grad(lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum(), (0, 1, 2))
    yield "attention backward", jax.jit(pull).lower(q, k, k)


def our_kernels(devices: Any, dtype: str) -> Iterator[tuple[str, Any]]:
    """Lower ours for the same."""
    short = "bf16" if dtype == "bfloat16" else "f32"

    def of(programs: Any, name: str) -> Any:
        return next(each for each in programs if each.name == f"{name} {short}")

    yield "grouped product", of(moe.grouped_mm, "forward").lower(devices, PRODUCT)
    yield "attention forward", of(attention.dense, "forward").lower(devices, PREFILL)
    yield "attention backward", of(attention.dense, "backward").lower(devices, PREFILL)
    if dtype == "bfloat16":  # which tiles of 8 bits are widened to
        for scales in ("row", "block"):
            given = fp8._SIZES["prefill"]
            yield f"8-bit product, {scales}", of(fp8.scaled_mm, f"forward {scales}").lower(devices, given)
    for name, sizes in attention._PAGES.items():
        yield f"decode, pages of {sizes['size']}", of(attention.paged, "forward").lower(devices, attention._PAGES[name])


def work(what: str, kernel: str, tile: Any, width: int, itemsize: int) -> tuple[float, float]:
    """Return the operations of a tile, and the bytes that it alone reads (0 where tiles share them)."""
    if what == "grouped product":
        return 2.0 * tile.rows * tile.inner * tile.columns, 0
    if what.startswith("8-bit"):
        return 2.0 * 512**3, 0
    if what.startswith("attention"):
        products = 2
        if what.endswith("backward"):
            products = 4 if "dkv" in kernel or "keys" in kernel else 3
        return 2.0 * products * width * width * DIM, 0
    sizes = next(each for each in attention._PAGES.values() if what.endswith(f" {each['size']}"))
    together = min(max(KEYS // (sizes["size"] * sizes["kv_heads"]), 1), MOST_TOGETHER, sizes["most"])
    numbers = together * sizes["size"] * sizes["kv_heads"] * sum(sizes["dims"])
    return 2.0 * sizes["heads"] / sizes["kv_heads"] * numbers, float(numbers * itemsize)


def measure(progress: Callable[[str], None] = print) -> list[Share]:
    """Compile everything for each chip."""
    dump = Path(tempfile.mkdtemp())
    tpu.prepare(dump)
    from jax.experimental import topologies

    found = []
    for chip in CHIPS:
        devices = topologies.get_topology_desc(str(chip_named(chip).target), "tpu").devices
        has, peaks = TPUS[chip], PRODUCTS[product_of(chip)]
        rate = 2 * has.mxus * has.mxu**2  # of a core in a cycle
        clock = peaks.bf16_tflops * 1e12 / (rate * has.cores)
        bandwidth = peaks.bandwidth * 1e9 / clock / has.cores  # bytes in a cycle
        for dtype, itemsize in _ITEMSIZE.items():
            tile = tile_of(PRODUCT["rows"], PRODUCT["groups"], PRODUCT["inner"], PRODUCT["columns"], itemsize)
            width = 512 if itemsize == 2 else 256
            both = (("kpt", our_kernels(devices, dtype)), ("jax", jax_kernels(devices, dtype, tile, width)))
            for whose, kernels in both:
                for what, lowered in kernels:
                    for kernel, bundles in sorted(scheduled(lowered, dump).items()):
                        if what == "attention backward" and "fwd" in kernel:
                            continue  # the gradient's own forward
                        flops, read = work(what, kernel, tile, width, itemsize)
                        matrix = flops * _PASSES[dtype] / rate / bundles
                        memory = read / bandwidth / bundles if read else None
                        found.append(Share(what, kernel, whose, chip, dtype, bundles, matrix, memory))
                        shown = f"{matrix:.0%} of the matrix units" + (f", {memory:.0%} of memory" if memory else "")
                        progress(f"{chip:6} {dtype:9} {what:22} {whose} {kernel:40} {bundles:6} bundles: {shown}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the report goes")
    given = parser.parse_args()
    report = [asdict(share) for share in measure()]
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
