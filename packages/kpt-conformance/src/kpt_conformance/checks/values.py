"""Values and gradients, whatever the layout of the arguments, the padding, and the NaNs among them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kpt_conformance.comparison import assert_reference_sound, assert_right, assert_same_bits
from kpt_conformance.extent import over
from kpt_conformance.tensors import scalable, tensors_of, with_one, with_tensors
from kpt_conformance.trial import Trial
from kpt_optimize.cases import Arguments

#: Of what a row of ties is multiplied by: `x * (1 / 7)` in float32 misses five of eight ties of float8 that `x / 7`
#: meets, and by 7 the largest number of float8 is still one of bfloat16.
_UNEVEN = 7


@over(models="all", drawn="all", dtypes=True)
def values(trial: Trial) -> None:
    """The result and every gradient are as near to float64 as the reference's.

    What must have the reference's bits has them for ties, zeros of either sign and rows of zeros too.
    """
    arguments = trial.arguments()
    got = trial.run(arguments)
    baseline, oracle = trial.truth(arguments)
    if trial.subject.kernel is None:
        reduction = trial.table.reduction(arguments) if trial.table.reduction else 1
        assert_reference_sound(got, oracle, trial.dtype, reduction)
    assert_right(got, baseline, oracle)
    exact = {out.dtype for name, out in baseline.outputs.items() if oracle.is_exact(name)}
    if exact and not trial.case.model:
        _require_roundings(trial, arguments, exact)


def _require_roundings(trial: Trial, arguments: Arguments, exact: Iterable[torch.dtype]) -> None:
    """Raise `AssertionError` unless numbers that tell roundings apart are computed rightly, one argument at a time.

    They have a result alone: at a tie there is no derivative.
    """
    __tracebackhide__ = True
    forward = trial.forward_only()
    for name in scalable(arguments):
        changed = with_one(arguments, name, telling(tensors_of(arguments)[name], exact))
        if trial.takes(changed):
            forward.assert_right(changed, forward.run(changed), f"with ties and zeros in {name}")


def telling(tensor: Tensor, results: Iterable[torch.dtype]) -> Tensor:
    """Other numbers in the place of an argument's, the same in every run.

    One element in eight is a zero of either sign, and so is every third row. The others are ties between two numbers
    of the coarsest dtype among the results, if that is coarser than the argument's; of an 8-bit dtype, whose codes are
    often scaled by the largest element, one in eight is the largest number. Every second row is seven times that, if
    the argument's dtype has such numbers.

    Args:
        tensor: floating [..., n].
        results: dtypes of what must have the reference's bits.
    """
    generator = torch.Generator().manual_seed(0)
    rows = tensor.detach().to("cpu", torch.float64).reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    # A dtype of exponents alone, as scales have it, has an eps of one.
    own = torch.finfo(tensor.dtype).eps
    coarser = [dtype for dtype in results if dtype.is_floating_point and own < torch.finfo(dtype).eps < 1]
    if coarser:
        rows = _ties(rows.shape, max(coarser, key=lambda dtype: torch.finfo(dtype).eps), generator)
        uneven = rows * _UNEVEN
        rows[::2] = (uneven if torch.equal(uneven.to(tensor.dtype).double(), uneven) else rows)[::2]
    zero = torch.randint(8, rows.shape, generator=generator) == 0
    zero[2::3] = True
    sign = 1 - 2 * torch.randint(2, rows.shape, generator=generator).double()
    return (torch.where(zero, 0.0, rows) * sign).view(tensor.shape).to(tensor.device, tensor.dtype)


def _ties(shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Numbers in float64, each half-way between two of a dtype, or an 8-bit dtype's largest."""
    info = torch.finfo(dtype)
    steps = round(1 / info.eps)
    significand = 1 + (torch.randint(steps, shape, generator=generator) + 0.5) / steps
    ties = significand * torch.randint(-3, 4, shape, generator=generator).double().exp2()
    largest = torch.randint(8, shape, generator=generator) == 0
    return torch.where(largest, info.max, ties) if dtype.itemsize == 1 else ties


def _transposed(tensor: Tensor) -> Tensor:
    """The same values, the last two dimensions exchanged in memory."""
    if tensor.dim() < 2:
        return _strided(tensor)
    return tensor.mT.contiguous().mT


def _strided(tensor: Tensor) -> Tensor:
    """The same values, every second place of a larger tensor; elsewhere NaN."""
    if tensor.dim() == 0:
        return tensor
    large = _unusable(tensor, [*tensor.shape[:-1], 2 * tensor.shape[-1]])
    large[..., ::2] = tensor
    return large[..., ::2]


def _unusable(tensor: Tensor, shape: list[int]) -> Tensor:
    """Return another tensor of the same dtype, full of NaN or of the largest number."""
    numbers = not tensor.is_floating_point() and tensor.dtype is not torch.bool
    filler = torch.iinfo(tensor.dtype).max if numbers else float("nan")
    full = torch.full(shape, filler, device=tensor.device, dtype=torch.int64 if numbers else torch.float64)
    return full.to(tensor.dtype)


def _shifted(tensor: Tensor) -> Tensor:
    """The same values, one element behind an aligned address."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    shifted = flat[1:].view(tensor.shape)
    return shifted.copy_(tensor)


def _padded(tensor: Tensor) -> Tensor:
    """The same values, a slice of wider and longer matrices, as of a fused weight or a shard; elsewhere NaN."""
    if tensor.dim() == 0:
        return tensor
    more = 16 // tensor.element_size()  # so that rows stay aligned
    large = _unusable(tensor, [*tensor.shape[:-2], *(size + more for size in tensor.shape[-2:])])
    part = large[..., : tensor.shape[-1]]
    part = part if tensor.dim() == 1 else part[..., : tensor.shape[-2], :]
    return part.copy_(tensor)


def _padded_columns(tensor: Tensor) -> Tensor:
    """Likewise of matrices stored the other way round."""
    return _padded(tensor.mT).mT if tensor.dim() > 1 else _padded(tensor)


def _behind(tensor: Tensor) -> Tensor:
    """The same values at an aligned address that is not where their memory begins, as `w[1:]` of a stack has it."""
    shape = (2, -(-tensor.numel() // 64) * 64)
    stack = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    return stack[1, : tensor.numel()].view(tensor.shape).copy_(tensor)


def _turned(tensor: Tensor) -> Tensor:
    """The same values, tokens before heads in memory: [B, S, H, D] seen as [B, H, S, D], as models have them."""
    return tensor.transpose(-3, -2).contiguous().transpose(-3, -2) if tensor.dim() > 2 else tensor


def _fused(tensor: Tensor) -> Tensor:
    """Likewise, a slice of what a projection of queries, keys and values at once gives; elsewhere NaN."""
    if tensor.dim() < 3:
        return _padded(tensor)
    *batch, heads, tokens, size = tensor.shape
    part = _unusable(tensor, [*batch, tokens, heads + 1, 3 * size])[..., 1:, size : 2 * size].transpose(-3, -2)
    return part.copy_(tensor)


def _expanded(tensor: Tensor) -> Tensor:
    """The first row in the place of all, with stride zero."""
    return _repeated(tensor, 0)


def _expanded_within(tensor: Tensor) -> Tensor:
    """Likewise of the second dimension, as heads share keys or a bias, or of the columns of a matrix."""
    return _repeated(tensor, 1)


def _repeated(tensor: Tensor, dim: int) -> Tensor:
    if not tensor.is_floating_point() or tensor.dim() <= dim or tensor.shape[dim] == 0:
        return tensor
    return tensor.narrow(dim, 0, 1).expand(tensor.shape)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": _transposed,
    "strided": _strided,
    "shifted": _shifted,
    "padded": _padded,
    "padded and transposed": _padded_columns,
    "behind other": _behind,
    "turned": _turned,
    "fused": _fused,
    "expanded": _expanded,
    "expanded within": _expanded_within,
}
#: In which other values stand than before.
_CHANGED = ("expanded", "expanded within")


@over(drawn="first", dtypes=True)
def layouts(trial: Trial) -> None:
    """Results don't depend on strides and places: transposed, strided, misaligned, sliced and expanded arguments.

    Of models: tokens before heads in memory, slices of fused projections and of caches. All arguments are laid out so,
    and transposed and turned ones are every second argument too.
    """
    arguments = trial.arguments()
    names = list(tensors_of(arguments))
    tried = [(f"with {layout} arguments", dict.fromkeys(names, layout)) for layout in LAYOUTS]
    # A kernel may ask for the layout of one argument and believe it of all.
    for layout in ("transposed", "turned") if _deep(arguments) else ("transposed",):
        for some in (names[::2], names[1::2]):
            tried.append((f"with {layout} {', '.join(some)}", dict.fromkeys(some, layout)))
    if _deep(arguments):
        # A step of decoding: what was projected just now beside a cache for more tokens.
        step = {name: "padded" if place else "turned" for place, name in enumerate(names)}
        tried.append((f"with turned {names[0]} beside slices of longer tensors", step))
    truth = trial.truth(arguments)
    for what, laid in tried:
        changed = _laid_out(trial, arguments, laid)
        others = any(layout in _CHANGED for layout in laid.values())
        if trial.takes(changed) if others else trial.refusal(changed) is None:
            assert_right(trial.run(changed), *(trial.truth(changed) if others else truth), what)


def _deep(arguments: Arguments) -> bool:
    """Tell whether an argument has heads, or the like, before its matrices."""
    return any(tensor.dim() > 2 for tensor in tensors_of(arguments).values())


def _laid_out(trial: Trial, arguments: Arguments, laid: Mapping[str, str]) -> Arguments:
    """The arguments, some of them in other layouts."""

    def change(name: str, tensor: Tensor) -> Tensor:
        # With stride zero many elements are the same memory, and nothing can be written there.
        left = name not in laid or (laid[name] in _CHANGED and trial.mutates(name))
        return tensor if left else LAYOUTS[laid[name]](tensor)

    return with_tensors(arguments, change)


@over(dtypes=True)
def cotangents(trial: Trial) -> None:
    """Gradients don't depend on the strides of what comes from behind: of `sum()` they are all zero."""
    if not trial.differentiable:
        pytest.skip("no gradients are promised")
    arguments = trial.arguments()
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "transposed": _transposed,
        "turned": _turned,
        "fused": _fused,
        "expanded": lambda pull: pull.flatten()[:1].sum().expand(pull.shape),
        "expanded within": _expanded_within,
        "shifted": _shifted,
        "padded": _padded,
        "behind other": _behind,
        # As after a long way back, or scaled down: no gradient is too small to count.
        "small": lambda pull: pull * torch.finfo(trial.dtype).tiny ** 0.25,
    }
    for name, layout in layouts.items():
        got = trial.run(arguments, cotangent=layout)
        assert_right(got, *trial.truth(arguments, cotangent=layout), f"with a {name} cotangent")


@over()
def far_strides(trial: Trial) -> None:
    """Offsets past 2**31 elements are reached, here by the stride of a dimension of few rows."""
    arguments = trial.arguments()
    tried = False
    for name, tensor in tensors_of(arguments).items():
        if tensor.dim() < 2 or tensor.shape[0] < 4 or tensor[0].numel() == 0 or not tensor.is_floating_point():
            continue
        # The last row begins beyond what an int32 reaches. The memory is asked for, but only the rows are touched.
        rows = tensor.shape[0]
        stride = -(-(2**31) // (rows - 1))
        size = (rows - 1) * stride + tensor[0].numel()
        try:
            memory = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
        except (RuntimeError, MemoryError) as error:
            pytest.skip(f"no room for {size * tensor.element_size() / 2**30:.1f} GiB of addresses: {error}")
        far = memory.as_strided(tensor.shape, (stride, *tensor[0].contiguous().stride()))
        far.copy_(tensor)
        changed = with_one(arguments, name, far)
        if trial.refusal(changed) is None:
            trial.assert_right(changed, trial.run(changed), f"with rows of {name} {stride} elements apart")
            tried = True
    if not tried:
        pytest.skip("no argument has four rows, or such strides are refused")


@over(drawn="first", dtypes=True, telling=("owned", "load", "mask"))
def padding(trial: Trial) -> None:
    """NaN and infinity where nothing may be read change nothing, and get a gradient of zero."""
    if trial.table.padding is None:
        pytest.skip("the op has no padding")
    arguments = trial.arguments()
    found = trial.table.padding(arguments).items()
    masks = {name: mask.expand(arguments[name].shape) for name, mask in found if mask.any()}
    if not masks:
        pytest.skip("the case has no padding")
    zeros = {name: _filled(arguments[name], mask, 0.0) for name, mask in masks.items()}
    baseline, oracle = trial.truth({**arguments, **zeros})
    for filler in (float("nan"), float("inf")):
        filled = {name: _filled(arguments[name], mask, filler) for name, mask in masks.items()}
        got = trial.run({**arguments, **filled})
        what = f"with {filler} in the padding of {', '.join(masks)}"
        assert_right(got, baseline, oracle, what)
        for name, mask in masks.items():
            gradient = got.gradients.get(name)
            assert gradient is None or not gradient[mask].any(), f"{what}: gradient of {name} is not zero there"


def _filled(tensor: Tensor, mask: Tensor, filler: float) -> Tensor:
    """A copy with `filler` where the mask is, or what the dtype has for it; torch fills no mask of 8-bit numbers."""
    return torch.where(mask, torch.tensor(filler, device=tensor.device).to(tensor.dtype), tensor)


@over(dtypes=True)
def nans(trial: Trial) -> None:
    """A NaN in an argument reaches the same elements of the result as in the reference, and no others."""
    arguments = trial.arguments()
    for name, tensor in tensors_of(arguments).items():
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        for place in {0, tensor.numel() - 1}:
            flat = tensor.flatten().clone()
            flat[place] = float("nan")
            changed = with_one(arguments, name, flat.view(tensor.shape))
            if trial.table.specified is not None and not trial.table.specified(changed):
                continue
            got, (baseline, oracle) = trial.run(changed), trial.truth(changed)
            for key, want in oracle.outputs.items():
                lost = (baseline.outputs[key].isnan() & want.isnan() & ~got.outputs[key].isnan()).sum().item()
                made = (~want.isnan() & got.outputs[key].isnan()).sum().item()
                assert not lost, f"{key}: swallows a NaN in element {place} of {name} in {lost} places"
                assert not made, f"{key}: a NaN in element {place} of {name} spreads to {made} places too many"
            exact = {key: out for key, out in baseline.outputs.items() if oracle.is_exact(key)}
            assert_same_bits(exact, got.outputs, f"a NaN in element {place} of {name} makes other bits")


@over(drawn="first", dtypes=True, telling=("owned", "load"))
def without_gradients(trial: Trial) -> None:
    """Where no gradient is wanted, perhaps by a path of its own, it does the same; and training goes on afterwards."""
    plain = trial.forward_only()  # some kernels take more calls, as those of decoding, where no gradient is wanted
    made = plain.arguments(), plain.arguments(seed=1)
    truths = [trial.forward_truth(arguments) for arguments in made]
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with trial.subject.chosen(), mode():
            copies = [with_tensors(arguments, lambda name, tensor: tensor.clone()) for arguments in made]
            if not torch.is_grad_enabled():
                copies = [trial.leaves(copy) for copy in copies]
            results = [trial.outputs(copy) for copy in copies]
        what = f"under {mode.__name__}, no gradient being wanted"
        wanting = [name for outputs in results for name, out in outputs.items() if out.requires_grad]
        assert not wanting, f"{what}, {', '.join(wanting)} wants one"
        for arguments, copy, outputs, truth in zip(made, copies, results, truths, strict=True):
            assert_right(trial.outcome(outputs, {}), *truth, what)
            kept = {name: tensor for name, tensor in tensors_of(arguments).items() if not trial.mutates(name)}
            assert_same_bits(kept, tensors_of(copy), f"{what}, the call changed this argument")
    if trial.refusal(made[0]) is None:
        trial.assert_right(made[0], trial.run(made[0]), "with gradients, after calls without")


@over()
def single_gradients(trial: Trial) -> None:
    """Each gradient is right where it is the only one that is wanted."""
    if not trial.differentiable:
        pytest.skip("no gradients are promised")
    arguments = trial.arguments()
    names = dict.fromkeys(n for n, t in tensors_of(arguments).items() if trial.wants_gradient(n, t))
    if len(names) < 2:
        pytest.skip("no two gradients are promised")
    for name in names:
        alone = replace(trial, table=replace(trial.table, gradients=(name,)))
        if alone.refusal(arguments) is None:
            alone.assert_right(arguments, alone.run(arguments), f"with the gradient of {name} alone")
