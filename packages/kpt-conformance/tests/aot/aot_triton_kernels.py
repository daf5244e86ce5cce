"""A matrix product in Triton as a kernel library would declare it, and mutants of it that break their contracts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl


@triton.jit
def _load_tile(pointer, rows, columns, stride, inside):
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _matmul_kernel(
    a, b, c, M, N, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        x = _load_tile(a, rows, inner, stride_a, (rows[:, None] < M) & (inner[None, :] < K))  # [BLOCK_M, BLOCK_K]
        y = _load_tile(b, inner, columns, stride_b, (inner[:, None] < K) & (columns[None, :] < N))  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(x, y, acc)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c + rows[:, None] * stride_c + columns[None, :], acc.to(c.dtype.element_ty), mask=inside)


@triton.jit
def _matmul_without_dot_kernel(
    a, b, c, M, N, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        x = _load_tile(a, rows, inner, stride_a, (rows[:, None] < M) & (inner[None, :] < K))
        y = _load_tile(b, inner, columns, stride_b, (inner[:, None] < K) & (columns[None, :] < N))
        acc += tl.sum(x[:, :, None].to(tl.float32) * y[None, :, :].to(tl.float32), axis=1)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c + rows[:, None] * stride_c + columns[None, :], acc.to(c.dtype.element_ty), mask=inside)


@triton.jit
def _matmul_descriptor_kernel(
    a, b, c, M, N, K, stride_a, stride_b, stride_c,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPECIALIZE: tl.constexpr = True,
):  # fmt: skip
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    of_a = tl.make_tensor_descriptor(a, [M, K], [stride_a, 1], [BLOCK_M, BLOCK_K])
    of_b = tl.make_tensor_descriptor(b, [K, N], [stride_b, 1], [BLOCK_K, BLOCK_N])
    of_c = tl.make_tensor_descriptor(c, [M, N], [stride_c, 1], [BLOCK_M, BLOCK_N])
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, tl.cdiv(K, BLOCK_K), warp_specialize=SPECIALIZE):
        acc = tl.dot(of_a.load([row, step * BLOCK_K]), of_b.load([step * BLOCK_K, column]), acc)
    of_c.store([row, column], acc.to(c.dtype.element_ty))


@triton.jit
def _copy_kernel(source, target, columns, step, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK
    target.store([place, columns * step], source.load([place, columns * step]))


def _signature(dtype: str) -> dict[str, str]:
    pointers = dict.fromkeys(("a", "b"), f"*{dtype}:16") | {"c": "*bf16:16"}
    # Masks of sizes that are not known to be multiples of 16 part the loads into single elements.
    return pointers | dict.fromkeys(("M", "N", "K", "stride_a", "stride_b", "stride_c"), "i32:16")


def _tile(m: int, n: int, k: int, warps: int, stages: int, **more: Any) -> dict[str, Any]:
    sizes = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    return {**sizes, "num_warps": warps, "num_stages": stages, "enable_fp_fusion": True, **more}


NVIDIA = {"128x128": _tile(128, 128, 64, 8, 3), "64x64": _tile(64, 64, 32, 4, 3)}
AMD = {"128x128": _tile(128, 128, 32, 8, 2, waves_per_eu=2), "64x64": _tile(64, 64, 32, 4, 2)}


@dataclass(frozen=True)
class Program:
    name: str
    function: Any
    signature: Mapping[str, str]
    contracts: Mapping[str, str]
    nvidia: Mapping[str, Mapping[str, Any]]
    amd: Mapping[str, Mapping[str, Any]]

    def configurations(self, chip: str) -> Mapping[str, Mapping[str, Any]]:
        return self.nvidia if chip.startswith("sm") else self.amd


def _program(name: str, contracts: Mapping[str, str], function: Any = _matmul_kernel, dtype: str = "bf16", **more: Any):
    given = {"nvidia": NVIDIA, "amd": AMD} | more
    return Program(name=name, function=function, signature=_signature(dtype), contracts=contracts, **given)


BF16 = _program(
    "bf16",
    {
        "sm80": "mma.sync of bf16, cp.async, ldmatrix, no spills, registers <= 255, smem <= 163 KiB, occupancy >= 8",
        "sm86": "mma.sync, cp.async, no spills, smem <= 99 KiB",
        "sm89": "mma.sync, cp.async, no spills, smem <= 99 KiB",
        "sm90": "wgmma of bf16, cp.async, no mma.sync, no spills, smem <= 227 KiB",
        "sm100": "tcgen05, no mma.sync, no spills, smem <= 227 KiB",
        "sm120": "mma.sync, no tcgen05, no spills, smem <= 99 KiB",
        "gfx90a": "v_mfma of bf16, no v_mfma of f16, no spills, registers <= 512, lds <= 64 KiB",
        "gfx942": "v_mfma of bf16, no spills, registers <= 512, lds <= 64 KiB, occupancy >= 8",
        "gfx950": "v_mfma of bf16, load_lds, no spills, lds <= 160 KiB",
        "gfx1100": "v_wmma of bf16, no spills, lds <= 64 KiB",
        "gfx1201": "v_wmma of bf16, no spills, lds <= 64 KiB",
    },
)

FP8 = _program(
    "fp8 e4m3fn",
    {
        "sm80": "unsupported: fp8 e4m3fn needs sm89",
        "sm89": "mma.sync of e4m3, no spills",
        "sm90": "wgmma of e4m3, no spills",
        "gfx942": "not offered: gfx942 has the fnuz kind, and emulates this one in f16",
    },
    dtype="fp8e4nv",
)

FNUZ = _program("fp8 e4m3fnuz", {"gfx942": "v_mfma of fp8, no v_mfma of f16, no spills"}, dtype="fp8e4b8")

DESCRIPTORS = _program(
    "bf16 by descriptors",
    {
        "sm90": "tma, wgmma, setmaxnreg, no cp.async, no spills, smem <= 227 KiB",
        "sm100": "tma, tcgen05, setmaxnreg, no cp.async, no spills, smem <= 227 KiB",
    },
    function=_matmul_descriptor_kernel,
    nvidia={"128x128": _tile(128, 128, 64, 4, 3)},
)

#: Descriptors made by the host, whose blocks depend on the configuration, and an argument that is always 1.
HOST_DESCRIPTORS = Program(
    name="copy by descriptors of the host",
    function=_copy_kernel,
    signature={
        **dict.fromkeys(("source", "target"), "tensordesc<bf16[{BLOCK}, 64]>"),
        "columns": "i32",
        "step": "i32:1",
    },
    contracts={"sm90": "tma, no spills"},
    nvidia={str(block): {"BLOCK": block, "num_warps": 4, "enable_fp_fusion": True} for block in (64, 128)},
    amd={},
)

SAMPLES = (BF16, FP8, FNUZ, DESCRIPTORS, HOST_DESCRIPTORS)

_SMALL = {"32x32": _tile(32, 32, 16, 4, 2)}
SPILLS = _program(
    "spills",
    {"sm90": "wgmma, no spills", "gfx942": "v_mfma, no spills"},
    nvidia={"256x256": _tile(256, 256, 32, 4, 2)},
    amd={"256x256": _tile(256, 256, 32, 2, 2)},
)
NO_DOT = _program(
    "no dot",
    # For gfx942 Triton finds the product in the sum, but takes float32 for it, as it is written.
    {"sm90": "wgmma", "gfx942": "v_mfma of bf16"},
    function=_matmul_without_dot_kernel,
    nvidia=_SMALL,
    amd=_SMALL,
)
TOO_MUCH_MEMORY = _program(
    "too much memory",
    {"sm89": "mma.sync", "gfx942": "v_mfma"},
    nvidia={"stages": _tile(128, 128, 64, 8, 6)},
    amd={"stages": _tile(128, 128, 128, 8, 4)},
)
TOO_MUCH_FOR_CONTRACT = _program(
    "too much for contract", {"sm90": "wgmma, smem <= 64 KiB"}, nvidia={"": NVIDIA["128x128"]}
)
STALE = _program("stale", {"sm90": "unsupported: it has no fp8"}, dtype="fp8e4nv", nvidia={"64x64": NVIDIA["64x64"]})
MUTANTS = (SPILLS, NO_DOT, TOO_MUCH_MEMORY, TOO_MUCH_FOR_CONTRACT, STALE)

ALL = SAMPLES + MUTANTS

ONE = _program("one", {"sm80": "mma.sync"}, nvidia={"64x64": NVIDIA["64x64"]})
_NO_FUSION = {name: value for name, value in NVIDIA["64x64"].items() if name != "enable_fp_fusion"}
WRONG = (
    _program("unknown clause", {"sm90": "wgma, no spills"}),
    _program("unknown chip", {"sm90": "not offered: slow", "sm9": "wgmma"}),
    _program("no contract", {"sm80": "mma.sync"}),
    _program("unknown option", {"sm90": "wgmma"}, nvidia={"": {**NVIDIA["64x64"], "num_warp": 4}}),
    _program("no fusion", {"sm90": "wgmma"}, nvidia={"": _NO_FUSION}),
    # A declaration that is at fault must not pass for a chip that lacks something.
    _program("no type", {"sm90": "unsupported: never"}, nvidia={"": {"num_warps": 4, "enable_fp_fusion": True}}),
    _program("no configuration", {"sm90": "wgmma"}, nvidia={}),
)
