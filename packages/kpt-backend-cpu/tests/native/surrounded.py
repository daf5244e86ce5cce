"""Tensors in the midst of NaN, at random and at odd places, and their float64 counterparts."""

import torch
from torch import Tensor

#: How far results may be off in units of their largest value: of a few roundings in the dtype.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Memory:
    """Tensors at odd places, and whether what is around them stayed as it was."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self._all: list[tuple[Tensor, Tensor]] = []

    def number(self, most: int) -> int:
        return int(torch.randint(most + 1, (), generator=self.random))

    def uniform(self, *shape: int) -> Tensor:
        """Between -1 and 1."""
        return torch.rand(shape, generator=self.random) * 2 - 1

    def place(self, values: Tensor, *, gaps: bool = True) -> Tensor:
        """`values` with a gap after each row, in the midst of NaN."""
        gap = self.number(5) if gaps else 0
        before, (*sizes, last) = self.number(9), values.shape
        count = sizes[0] * (last + gap) if len(sizes) == 1 else sizes[0] * sizes[1] * (last + gap)
        size = values.element_size()
        # All bits set is NaN in every float dtype, and -1 in the others.
        around = torch.full(((before + count + 9) * size,), 255, dtype=torch.uint8)
        strides = (last + gap, 1) if len(sizes) == 1 else (sizes[1] * (last + gap), last + gap, 1)
        inside = around.view(values.dtype).as_strided(values.shape, strides, before)
        inside.copy_(values)
        others = torch.ones(before + count + 9, dtype=torch.bool)
        others.as_strided(values.shape, strides, before).fill_(False)
        self._all.append((around.view(-1, size), others))
        return inside

    def empty(self, dtype: torch.dtype, *shape: int, gaps: bool = True) -> Tensor:
        """NaN, in place."""
        return self.place(torch.full(shape, float("nan")).to(dtype), gaps=gaps)

    def is_whole(self) -> bool:
        """Whether nothing was written but the tensors."""
        return all(bool((around[others] == 255).all()) for around, others in self._all)


def offsets_of(memory: Memory, count: int, experts: int) -> Tensor:
    """End rows: some experts have none, and some rows may be nobody's."""
    ends = torch.randint(count + 1, (experts,), generator=memory.random).sort().values
    if memory.number(2) == 0:
        ends[-1] = count
    return ends.int()


def weights(
    memory: Memory, dtype: torch.dtype, experts: int, inner: int, columns: int, scale: str, *, n_contiguous: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Matrices `[experts, K, N]` in either order, their scales, and both in float64."""
    shape = (experts, inner, columns) if n_contiguous else (experts, columns, inner)
    stored = memory.place((memory.uniform(*shape) * 1.7 * inner**-0.5).to(dtype))
    weight = stored if n_contiguous else stored.mT
    parts = {
        "n": (experts, 1, columns),
        "k": (experts, inner, 1),
        "block": (experts, -(-inner // 128), -(-columns // 128)),
    }
    if scale not in parts:
        return weight, None, weight.double()
    factor = memory.place(memory.uniform(*parts[scale]).abs() + 0.5)
    whole = factor.double()
    if scale == "block":
        whole = whole.repeat_interleave(128, 1)[:, :inner].repeat_interleave(128, 2)[:, :, :columns]
    return weight, factor, weight.double() * whole


def products(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`moe.grouped_mm` as its sentence says it."""
    out, begin = x.new_zeros(x.shape[0], weight.shape[2]), 0
    for expert, end in enumerate(offsets.tolist()):
        out[begin:end] = x[begin:end] @ weight[expert]
        begin = end
    return out


def assert_close(name: str, got: Tensor, want: Tensor, factor: float = 1.0) -> None:
    error = (got.double() - want).abs()
    bound = TOLERANCE[got.dtype] * factor * (1 + want.abs().max()) if want.numel() else 0.0
    assert bool((error <= bound).all()), f"{name}: off by {error.max():.3g}, at most {bound:.3g} is right"
