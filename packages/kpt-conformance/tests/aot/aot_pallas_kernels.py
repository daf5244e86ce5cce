"""A matrix product in Pallas as a kernel library would declare it, and mutants of it that break their contracts."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def _matmul_kernel(a, b, c, acc):
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)

    acc[...] += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        c[...] = acc[...].astype(c.dtype)


def _add_kernel(a, b, c, acc):
    c[...] = a[...] + b[...]


@dataclass(frozen=True)
class Program:
    name: str
    contracts: Mapping[str, str]
    tiles: Mapping[str, Mapping[str, int]]
    kernel: Any = _matmul_kernel

    def configurations(self, chip: str) -> Mapping[str, Mapping[str, int]]:
        return self.tiles

    def lower(self, devices: Sequence[Any], configuration: Mapping[str, Any]) -> Any:
        import jax
        import jax.numpy as jnp
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        size, tile = 2048, configuration["tile"]
        inner = configuration.get("inner", tile)
        call = pl.pallas_call(
            self.kernel,
            out_shape=jax.ShapeDtypeStruct((size, size), jnp.bfloat16),
            grid=(size // tile, size // tile, size // inner),
            in_specs=[
                pl.BlockSpec((tile, inner), lambda i, j, k: (i, k)),
                pl.BlockSpec((inner, tile), lambda i, j, k: (k, j)),
            ],
            out_specs=pl.BlockSpec((tile, tile), lambda i, j, k: (i, j)),
            scratch_shapes=[pltpu.VMEM((tile, tile), jnp.float32)],
        )
        placed = jax.sharding.SingleDeviceSharding(devices[0])
        argument = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=placed)
        return jax.jit(call).lower(argument, argument)


_TILE = {"256": {"tile": 256}}
_CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
SAMPLE = Program("matmul", dict.fromkeys(_CHIPS, "mosaic, mxu of bf16, no spills, vmem <= 16 MiB"), _TILE)

MUTANTS = (
    Program("too much for contract", {"v5e": "mosaic, vmem <= 512 KiB"}, _TILE),
    Program("too much for chip", {"v5e": "mosaic, vmem <= 16 MiB"}, {"2048": {"tile": 2048}}, _add_kernel),
    Program("no matrix unit", {"v5e": "mosaic, mxu"}, _TILE, _add_kernel),
    Program("spills", {"v5e": "mosaic, mxu, no spills"}, {"1024": {"tile": 1024, "inner": 512}}),
)


@dataclass(frozen=True)
class Crash(Program):
    """Takes the process of its compiler down, as an assertion of LLVM does."""

    def lower(self, devices: Sequence[Any], configuration: Mapping[str, Any]) -> Any:
        os.abort()


# That the compiler crashed is no proof that a chip can't have it.
CRASH = (Crash("crash", {"v6e": "unsupported: it crashes"}, _TILE), Program("other", {"v6e": "mosaic, mxu"}, _TILE))
TWICE = (SAMPLE, SAMPLE)
NOT_OFFERED = Program("not offered", {"v4": "not offered: it is too small", "v5e": "mosaic"}, _TILE)
