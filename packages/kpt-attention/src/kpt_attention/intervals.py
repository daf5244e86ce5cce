"""Sets of keys as sorted intervals, one row of them for each query: `[..., n, 2]` int64 begins and ends, exact.

An interval without keys is `(0, 0)` and stands at the end of its row.
"""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def readable(tensor: Tensor) -> bool:
    """Return whether a tensor's values can be read: not those of a graph's, a fake or the meta device."""
    return not (torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor))


def tidy(begins: Tensor, ends: Tensor, most: int | None = None) -> Tensor:
    """Return intervals `[..., m]` in any order as sorted ones that neither meet nor touch, `[..., n, 2]`.

    Args:
        begins: the first key of each.
        ends: the first key after it.
        most: how many a row can have left, `m` if None. It is `n` where no value can be read, which is else less.
    """
    if begins.shape[-1] == 1:
        return torch.stack((begins, ends), -1).masked_fill((begins >= ends).unsqueeze(-1), 0)
    empty = begins >= ends
    far = torch.iinfo(begins.dtype).max
    begins, order = begins.masked_fill(empty, far).sort(-1)
    ends = ends.masked_fill(empty, far).gather(-1, order)
    reach = ends.cummax(-1).values
    opens = torch.ones_like(begins, dtype=torch.bool)
    opens[..., 1:] = begins[..., 1:] > reach[..., :-1]
    # Each interval that opens a new one gives its begin; the end is how far those reach that it absorbs.
    place = opens.cumsum(-1) - 1
    merged = torch.full((*begins.shape, 2), far, dtype=begins.dtype, device=begins.device)
    merged[..., 0].scatter_reduce_(-1, place, begins, "amin")
    merged[..., 1].fill_(0).scatter_reduce_(-1, place, ends, "amax")
    count = begins.shape[-1] if most is None else most
    if readable(begins):
        count = max(int((place + 1).masked_fill(begins == far, 0).max()), 1) if begins.numel() else 1
    merged = merged[..., :count, :]
    return merged.masked_fill((merged[..., :1] == far) | (merged[..., 1:] == far), 0)


def intersect(one: Tensor, other: Tensor) -> Tensor:
    """Return the keys of both; the rows must be tidy."""
    begins = torch.maximum(one[..., :, None, 0], other[..., None, :, 0])
    ends = torch.minimum(one[..., :, None, 1], other[..., None, :, 1])
    # Of sorted ones, each begins where one of either does, and none before the first of both.
    return tidy(begins.flatten(-2), ends.flatten(-2), one.shape[-2] + other.shape[-2] - 1)


def unite(one: Tensor, other: Tensor) -> Tensor:
    """Return the keys of either."""
    shape = torch.broadcast_shapes(one.shape[:-2], other.shape[:-2])
    both = torch.cat([each.expand(*shape, *each.shape[-2:]) for each in (one, other)], -2)
    return tidy(both[..., 0], both[..., 1])


def complement(rows: Tensor, keys: int) -> Tensor:
    """Return the other keys of `keys` in all; the rows must be tidy."""
    rows = rows.masked_fill((rows[..., :1] >= rows[..., 1:]), keys)
    edge = rows.new_zeros(()).expand(*rows.shape[:-2], 1)
    return tidy(torch.cat((edge, rows[..., 1]), -1), torch.cat((rows[..., 0], edge + keys), -1))


def runs(allowed: Tensor, most: int | None = None) -> Tensor | None:
    """Return the runs of True in `[..., keys]` bool as intervals `[..., n, 2]`; None if a row has more than `most`.

    None, too, where no value can be read: nobody knows then how many there are.
    """
    if not readable(allowed):
        return None
    flat = allowed.flatten(0, -2)
    edge = flat.new_zeros((flat.shape[0], 1))
    changes = torch.cat((edge, flat), 1) ^ torch.cat((flat, edge), 1)
    counts = changes.sum(-1, dtype=torch.int32) // 2
    count = int(counts.max()) if len(flat) else 0
    if most is not None and count > most:
        return None
    places = changes.nonzero()  # of each row begins and ends in turn
    row = places[::2, 0]
    order = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    found = torch.zeros((len(flat), max(count, 1), 2), dtype=torch.int64, device=flat.device)
    found[row, order] = places[:, 1].view(-1, 2)
    return found.view(*allowed.shape[:-1], *found.shape[1:])


def rows_of(nothing: Tensor) -> Tensor:
    """Return intervals without keys in the shape of `nothing`, `[..., 1]`."""
    return torch.zeros((*nothing.shape, 2), dtype=torch.int64, device=nothing.device)
