"""Write a Triton kernel for an operation of KPT, offer it, let the conformance suite judge it, and see it chosen.

The kernel is a grouped product in its simplest form: `kpt_triton.moe.grouped_mm` is the fast one. Without a GPU it runs
in Triton's interpreter, which shows that its numbers are right and nothing of its speed.
"""

# ruff: noqa: ANN001, ANN201  a kernel's parameters have types at run time alone

import os
import sys

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

import triton
import triton.language as tl

import kpt_core
from kpt_core.registry import add_backend
from kpt_moe import MoEConfig, MoELayer
from kpt_moe.grouped_mm import grouped_mm_wgrad
from kpt_triton.numeric import dot, narrow  # what compiler and interpreter must do alike

GPU = torch.cuda.is_available()
BLOCK = 64 if GPU else 128  # interpreted, a step takes as long for a large block as for a small one


# 1. The kernel: a program computes BLOCK rows of one expert by BLOCK columns.
@triton.jit
def product_kernel(x, weight, out, offsets, K, N, x_row, x_inner, w_expert, w_inner, w_column, SIDE: tl.constexpr):
    """`out[r] = x[r] @ weight[expert of r]`; behind the sizes come the strides."""
    expert = tl.program_id(0).to(tl.int64)  # 32 bits would not reach past 2^31 elements
    first, end = tl.load(offsets + expert - 1, mask=expert > 0, other=0), tl.load(offsets + expert)
    rows = first + tl.program_id(1) * SIDE + tl.arange(0, SIDE).to(tl.int64)
    columns = tl.program_id(2) * SIDE + tl.arange(0, SIDE)
    taken = (rows < end)[:, None]
    inside = (columns < N)[None, :]
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, tl.where(first + tl.program_id(1) * SIDE < end, K, 0), SIDE):
        inner = start + tl.arange(0, SIDE)
        x_tile = tl.load(x + rows[:, None] * x_row + inner[None, :] * x_inner, taken & (inner < K)[None, :], 0.0)
        places = weight + expert * w_expert + inner[:, None] * w_inner + columns[None, :] * w_column
        total = dot(x_tile, tl.load(places, (inner < K)[:, None] & inside, 0.0), total, "ieee")
    tl.store(out + rows[:, None] * N + columns[None, :], narrow(total, out.dtype.element_ty), taken & inside)


# 2. The kernel as KPT calls it: a function of the call's record, and one for its gradients. KPT ties them to autograd,
# and keeps them whole under torch.compile and export.
def product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Launch the kernel; rows of no expert stay zero."""
    experts, inner, columns = weight.shape
    out = x.new_zeros(x.shape[0], columns)
    grid = (experts, triton.cdiv(x.shape[0], BLOCK), triton.cdiv(columns, BLOCK))
    if min(grid) > 0:
        sizes = (inner, columns, *x.stride(), *weight.stride())
        product_kernel[grid](x, weight, out, offsets.contiguous(), *sizes, SIDE=BLOCK, enable_fp_fusion=True)
    return out


def forward(call: kpt_core.Call) -> Tensor:
    """`moe.grouped_mm` by the kernel above."""
    return product(call.x, call.weight, call.offsets)


def backward(call: kpt_core.Call, saved: tuple[()], grad: Tensor) -> dict[str, Tensor]:
    """The gradients that are wanted; this op saves nothing beside its arguments."""
    gradients = {}
    if "x" in call.needs:
        gradients["x"] = product(grad, call.weight.mT, call.offsets)
    if "weight" in call.needs:
        gradients["weight"] = grouped_mm_wgrad(call.x, grad, call.offsets)
    return gradients


# 3. A backend that offers it.
class Mine(kpt_core.Backend):
    """A backend; that of a package is found through the entry-point group `kpt.backends`."""

    name, device_types = "mine", ("cuda" if GPU else "cpu",)

    def capabilities(self, device: torch.device) -> frozenset[str]:
        """What kernels may require."""
        return frozenset({"triton"})

    def kernels(self) -> tuple[kpt_core.Kernel, ...]:
        """One, before kpt-backend-nvidia's with its priority of 20."""
        return (
            kpt_core.Kernel(
                "moe.grouped_mm",
                forward=f"{__name__}:forward",
                backward=f"{__name__}:backward",
                composed_of=("moe.grouped_mm_wgrad",),
                requires={"triton"},
                dtypes={"float32", "bfloat16", "float16"},
                priority=30,
            ),
        )


def main() -> None:
    """Offer the kernel, have it judged, use it."""
    torch.manual_seed(0)
    op = kpt_core.get_op("moe.grouped_mm")
    x, weight = torch.randn(100, 48), torch.randn(4, 48, 40)
    offsets = torch.tensor([30, 30, 75, 90], dtype=torch.int32)  # the second expert has no rows, and ten have no expert
    tensors = [tensor.to(Mine.device_types[0]) for tensor in (x, weight, offsets)]
    with kpt_core.use("reference"):
        expected = op(*tensors)
    add_backend(Mine())
    print(f"added: {kpt_core.explain(op, *tensors)}")
    print(f"largest difference from the reference: {(op(*tensors) - expected).abs().max():.1e}\n")

    # `pytest --kpt-backend=NAME` is the whole suite, for an installed backend; this is a part that takes seconds.
    chosen = (
        "moe.grouped_mm and float32 and (values or padding or nans or single_gradients or compiled) and not granite"
    )
    if pytest.main(["--kpt-backend=mine", "-k", chosen, "-q", "-p", "no:cacheprovider"]) != pytest.ExitCode.OK:
        sys.exit("the kernel does not do what the op promises: it must not be offered")

    print("\nwithin use, what is named must run, and otherwise whatever comes first and accepts the call:")
    for name in ("reference", "mine"):
        with kpt_core.use(name, op="moe.grouped_mm"):
            print(f"use({name!r}): {kpt_core.explain(op, *tensors).kernel}")
    print(f"in float64: {kpt_core.explain(op, *(t.double() if t.is_floating_point() else t for t in tensors))}")

    layer = MoELayer(MoEConfig(hidden_size=48, num_experts=4, top_k=2, intermediate_size=64)).to(tensors[0].device)
    # A kernel of a whole layer's op that is composed of this one; others come before it.
    grouped = "kpt_moe.torch_kernels.experts_grouped:forward"
    with kpt_core.use(grouped, op="moe.experts"), kpt_core.record() as selections:
        layer(tensors[0]).sum().backward()
    parts = [part for selection in selections for part in (selection, *selection.children)]
    served = sorted({(part.op, part.kernel) for part in parts if part.op.startswith("moe.grouped")})
    print("a step of a layer:", ", ".join(f"{name} by {kernel}" for name, kernel in served))


if __name__ == "__main__":
    main()
