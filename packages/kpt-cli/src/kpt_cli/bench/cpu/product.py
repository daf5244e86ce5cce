"""The contest of a single product with 8-bit weights."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_moe.quantised_experts import quantise_weights
from kpt_moe.scaled_grouped_mm import scaled_grouped_mm

from .ceilings import Work, last_cache
from .contest import LAYERS, Call, Contest, Contestant, Role, Trial, in_plain_pytorch
from .float8 import SCHEMES, dequantised


def product_contest(size: int, rows: int, scheme: str, seed: int) -> Contest:
    """`[rows, size]` of bfloat16 times a square matrix of float8_e4m3fn: one expert's share of a grouped product.

    Beside it: `F.linear` in float32 and bfloat16, and `torch._scaled_mm`, which quantises the left side too. Each takes
    turns over copies of its matrix that together are four times as large as the last cache.

    Args:
        size: rows and columns of the matrix.
        rows: of the left side.
        scheme: of the scales, see `quantise_weights`.
        seed: of the numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, size, generator=generator) / size**0.5
    x = torch.randn(rows, size, generator=generator)
    codes, scale = quantise_weights(weight.unsqueeze(0), scheme)
    matrices = _copies(codes)
    x16 = x.bfloat16()
    # In blocks the scales are those of the stored matrix, by output and input; the op wants input first.
    own = scale.mT if scale.dim() == 3 else scale
    offsets = torch.tensor([rows], dtype=torch.int32)
    exact = x16.double() @ dequantised(codes[0], scale[0]).T
    ours: list[Call] = [partial(scaled_grouped_mm, x16, matrix.mT, own, offsets) for matrix in matrices]
    contestants = [
        _contestant("kpt", "kpt", torch.bfloat16, ours, exact),
        _contestant("plain", "plain", torch.bfloat16, [in_plain_pytorch(call) for call in ours], exact),
        *(
            _contestant(
                f"linear {name}",
                "peer",
                dtype,
                [partial(F.linear, x.to(dtype), matrix) for matrix in _copies(weight.to(dtype))],
                x.to(dtype).double() @ weight.to(dtype).double().T,
            )
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        ),
        _scaled_mm(x, weight),
    ]
    return Contest(
        group="product",
        name=f"{size} x {size}, M={rows}",
        sizes={"rows": rows, "inner": size, "columns": size},
        dtype=SCHEMES[scheme],
        work=Work(
            2 * rows * size * size, codes.nbytes + scale.nbytes + 4 * rows * size, (torch.bfloat16, torch.float32)
        ),
        rotation=codes.nbytes * len(matrices),
        contestants=contestants,
        yardstick="plain",
        in_a_row=LAYERS,
    )


def _contestant(name: str, role: Role, dtype: torch.dtype, calls: Sequence[Call], exact: Tensor) -> Contestant:
    return Contestant(name, role, dtype, calls, [Trial(lambda: (calls[0](),), (exact,))])


def _scaled_mm(x: Tensor, weight: Tensor) -> Contestant:
    """The product of two 8-bit matrices, one scale each, by PyTorch."""
    (left, left_scale), (right, right_scale) = _by_tensor(x), _by_tensor(weight)
    calls: list[Call] = [
        partial(
            torch._scaled_mm,
            left,
            matrix.t(),
            scale_a=left_scale,
            scale_b=right_scale,
            out_dtype=torch.bfloat16,
        )
        for matrix in _copies(right)
    ]
    exact = (left.double() * left_scale) @ (right.double() * right_scale).T
    return _contestant("_scaled_mm", "peer", torch.bfloat16, calls, exact)


def _by_tensor(numbers: Tensor) -> tuple[Tensor, Tensor]:
    scale = numbers.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (numbers / scale).to(torch.float8_e4m3fn), scale


def _copies(matrix: Tensor) -> list[Tensor]:
    count = max(2, -(-4 * last_cache() // matrix.nbytes))
    return [matrix, *(matrix.clone() for _ in range(min(count, 64) - 1))]
