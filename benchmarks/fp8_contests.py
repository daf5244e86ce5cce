"""FP8, and linear layers of few rows, as contests: layers, products of 8-bit operands, quantising; beside torch."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from devices import Call, Work
from harness import Contest, Contestant, Role
from torch import Tensor
from torch.nn import functional as F

from kpt_fp8 import dequantize, linear, quantize, scaled_mm
from kpt_optimize.linear import linear as dense

_FP8 = torch.float8_e4m3fn
#: Bytes of weights that calls of few rows go round, so that no cache holds them.
_FROM_MEMORY = 2**28


def without_onednn(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply as torch does without oneDNN: by its own products of a matrix and a vector."""
    with torch.backends.mkldnn.flags(enabled=False):
        return F.linear(x, weight)


def few_rows_contest(
    rows: int, columns: int, inner: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Contest:
    """Make a linear layer of few rows as it is, `[rows, inner]` by `[columns, inner]`, on weights that no cache holds.

    Beside it `nn.Linear`, the same without oneDNN, and KPT's layer of e4m3 weights with a scale for each row of them.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    weight = (torch.randn(columns, inner, generator=generator) * inner**-0.5).to(dtype)
    codes, scale = quantize(weight, granularity="row")
    scale = scale.float()

    def contestant(name: str, role: Role, run: Callable[[Tensor, Tensor], Tensor], matrix: Tensor) -> Contestant:
        count = max(2, min(_FROM_MEMORY // weight.nbytes, 400))
        calls: list[Call] = [partial(run, x, matrix.clone()) for _ in range(count)]
        exact = matrix.double() if matrix is weight else matrix.double() * scale.double()[:, None]
        return Contestant(name, role, dtype, calls, lambda: [calls[0]()], [x.double() @ exact.T])

    return Contest(
        group="few rows",
        name=f"{columns} x {inner}, M={rows}",
        sizes={"rows": rows, "inner": inner, "columns": columns},
        dtype={torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype],
        work=Work(2 * rows * inner * columns, weight.nbytes, (dtype, torch.float32)),
        contestants=[
            contestant("kpt", "kpt", dense, weight),
            contestant("kpt fp8", "own", lambda x, w: linear(x, w, scale, activations="none"), codes),
            contestant("linear", "peer", F.linear, weight),
            contestant("without oneDNN", "peer", without_onednn, weight),
        ],
        yardstick="linear",
        margins=(1.5, 3.0),
        in_a_row=4,
    )


def linear_contest(
    rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device, seed: int, *, activations: str
) -> Contest:
    """Make a linear layer of e4m3 weights with a scale for each row of them.

    Beside it: torch's own layer of `dtype`, and `torch._scaled_mm`, whose activations are quantised in the call.

    Args:
        rows: of activations.
        inner: their size.
        columns: of the result.
        dtype: of activations and result.
        device: where it runs.
        seed: of the numbers.
        activations: `none` leaves them as they are, `row` quantises each row of them.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.empty(rows, inner, dtype=dtype, device=device).normal_(generator=generator)
    weight = torch.empty(columns, inner, dtype=dtype, device=device).normal_(0, inner**-0.5, generator=generator)
    codes, scale = quantize(weight, dtype=_FP8, granularity="row")
    scale = scale.float()
    exact_weight = codes.double() * scale.double()[:, None]
    few = x[:64]
    left = few.double()
    if activations == "row":
        own, own_scale = quantize(few, dtype=_FP8, granularity="row")
        left = own.double() * own_scale.double()[:, None]
    exact = left @ exact_weight.T
    most = 16 if device.type == "cuda" else 64
    copies = min(most, -(-_FROM_MEMORY // codes.nbytes)) if rows < 64 else 1

    def contestant(name: str, role: Role, run: Callable[[Tensor, Tensor], Tensor], matrix: Tensor) -> Contestant:
        calls: list[Call] = [partial(run, x, each) for each in _copies(matrix, copies)]
        # By `dtype` numbers, torch's layer has other weights than ours.
        own = [x[:64].double() @ matrix.double().T] if matrix.dtype is dtype else [exact]
        return Contestant(name, role, dtype, calls, lambda: [calls[0]()[:64]], own)

    def by_torch(x: Tensor, codes: Tensor) -> Tensor:
        own, own_scale = quantize(x, dtype=_FP8, granularity="row")
        return torch._scaled_mm(
            own, codes.t(), scale_a=own_scale.float()[:, None], scale_b=scale[None], out_dtype=dtype
        )

    wide = dequantize(codes, scale, granularity="row", dtype=dtype)
    peers = [contestant("linear", "peer", F.linear, wide)]
    if device.type == "cpu" and rows <= 16:
        peers.append(contestant("without oneDNN", "peer", without_onednn, wide))
    if activations == "row":
        peers.append(contestant("_scaled_mm", "peer", by_torch, codes))
    return Contest(
        group="fp8",
        name=f"linear {rows} x {inner} x {columns}, activations {activations}",
        sizes={"rows": rows, "inner": inner, "columns": columns},
        dtype="fp8 row",
        work=Work(
            2 * rows * inner * columns, codes.nbytes + scale.nbytes + 2 * rows * (inner + columns), (torch.bfloat16,)
        ),
        contestants=[
            contestant("kpt", "kpt", lambda x, codes: linear(x, codes, scale, activations=activations), codes),
            *peers,
        ],
        yardstick="linear",
        margins=(1.5, 3.0),
        in_a_row=4 if device.type == "cpu" and rows < 64 else 1,
        graph=rows < 64,
    )


def product_contest(size: int, granularity: str, device: torch.device, seed: int) -> Contest:
    """Make a square product of e4m3 that gives bfloat16, beside `torch._scaled_mm` and a product of bfloat16."""
    generator = torch.Generator(device).manual_seed(seed)
    a, b = (torch.empty(size, size, device=device).normal_(generator=generator) for _ in range(2))
    by = {"tensor": ("tensor", "tensor"), "row": ("row", "row"), "blocks": ("1x128", "128x128")}[granularity]
    (left, of_left), (right, of_right) = (
        quantize(x, dtype=_FP8, granularity=g) for x, g in zip((a, b), by, strict=True)
    )
    rows = slice(0, min(size, 64))
    values = [dequantize(c, s, granularity=g, dtype=torch.float64) for c, s, g in
              ((left, of_left, by[0]), (right, of_right, by[1]))]  # fmt: skip
    exact = values[0][rows] @ values[1].T
    narrow = a.bfloat16(), b.bfloat16()

    def contestant(name: str, role: Role, run: Call, exact: Tensor) -> Contestant:
        return Contestant(name, role, torch.bfloat16, [run], lambda: [run()[rows]], [exact])

    def ours() -> Tensor:
        scale_b = of_right.t() if granularity == "blocks" else of_right
        return scaled_mm(
            left, right.t(), of_left, scale_b, granularity_a=by[0], granularity_b=by[1], out_dtype=torch.bfloat16
        )

    def by_torch() -> Tensor:
        scales = (of_left[:, None], of_right[None]) if granularity == "row" else (of_left, of_right)
        return torch._scaled_mm(left, right.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16)

    peers = [contestant("mm of bf16", "peer", lambda: narrow[0] @ narrow[1].T,
                        narrow[0][rows].double() @ narrow[1].double().T)]  # fmt: skip
    if granularity != "blocks":
        peers.append(contestant("_scaled_mm", "peer", by_torch, exact))
    return Contest(
        group="fp8",
        name=f"scaled_mm {size}, {granularity}",
        sizes={"rows": size, "inner": size, "columns": size},
        dtype="fp8",
        work=Work(2 * size**3, 2 * size * size + 2 * size * size, (torch.bfloat16,)),
        contestants=[contestant("kpt", "kpt", ours, exact), *peers],
        yardstick="mm of bf16",
        margins=(1.5, 3.0),
    )


def quantize_contest(
    rows: int, inner: int, granularity: str, dtype: torch.dtype, device: torch.device, seed: int, *, compiler: str
) -> Contest:
    """Make the quantisation of activations to e4m3, beside the usual one in PyTorch's calls, eager and compiled.

    What codes and scales stand for is compared with what was quantised: a code that is a step away is off by more than
    half a step, which is all that rounding explains.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.empty(rows, inner, dtype=dtype, device=device).normal_(generator=generator)
    width = inner if granularity == "row" else 128

    def usual(x: Tensor) -> tuple[Tensor, Tensor]:
        blocks = x.view(rows, -1, width).float()
        scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        return (blocks / scale).to(_FP8).view(rows, inner), scale.squeeze(-1)

    def contestant(name: str, role: Role, run: Callable[[Tensor], Sequence[Tensor]]) -> Contestant:
        def check() -> list[Tensor]:
            codes, scale = run(x)
            return [(codes.double().view(rows, -1, width) * scale.double().view(rows, -1, 1)).view(rows, inner)]

        return Contestant(name, role, _FP8, [partial(run, x)], check, [x.double()])

    return Contest(
        group="fp8",
        name=f"quantize {rows} x {inner}, {granularity}",
        sizes={"rows": rows, "inner": inner},
        dtype="fp8",
        work=Work(0, x.nbytes + rows * inner, (dtype,)),
        contestants=[
            contestant("kpt", "kpt", lambda x: quantize(x, dtype=_FP8, granularity=granularity)),
            contestant("eager", "peer", usual),
            contestant("compiled", "peer", torch.compile(usual, backend=compiler)),
        ],
        yardstick="eager",
        margins=(1.5, 3.0),
    )


def _copies(tensor: Tensor, count: int) -> list[Tensor]:
    return [tensor, *(tensor.clone() for _ in range(count - 1))]
