"""Make golden results: inputs at several sizes, what a reference in 64 bits gives for them, and the usual error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import kpt_core
from kpt_serve.errors import PackageError

from .exporting import Arguments, Dynamic
from .golden import Case, Golden, Run, errors_of, run_cases
from .manifest import Manifest
from .weights import Program, Weights, call_with, named_results


def write_program_results(
    folder: Path,
    manifest: Manifest,
    model: nn.Module,
    weights: Weights,
    given: Arguments,
    dynamic: Dynamic,
    seed: int,
) -> None:
    """Write the golden results of a program that stands in a folder with its weights, as it runs here."""
    cases = golden_inputs(given.tensors, dynamic, seed)
    dtype, outputs = _reference(model, weights, given, cases, [each.name for each in manifest.outputs])
    device_type = next(iter(given.tensors.values())).device.type if given.tensors else manifest.device_types[0]
    _finish(folder, Program(folder, manifest, device_type), cases, outputs, dtype, device_type)


def _finish(folder: Path, run: Run, cases: list[Case], outputs: list[Case], dtype: str, device_type: str) -> None:
    results, *_ = run_cases(run, cases, device_type)
    Golden(cases, outputs, _usual_errors(run, results, cases, outputs, device_type), dtype).write(folder)


def _usual_errors(
    run: Run, results: Sequence[Case], cases: Sequence[Case], outputs: Sequence[Case], device_type: str
) -> dict[str, tuple[float, float]]:
    """Return the larger of the errors of the kernels here, and of the ops' references in the model's own dtype.

    Kernels that sum in a better order than most would else call those of another machine wrong.
    """
    found = errors_of(results, outputs)
    with kpt_core.use("reference"):
        plain, *_ = run_cases(run, cases, device_type)
    for name, others in errors_of(plain, outputs).items():
        found[name] = (max(found[name][0], others[0]), max(found[name][1], others[1]))
    return found


def golden_inputs(tensors: Mapping[str, Tensor], dynamic: Dynamic, seed: int) -> list[Case]:
    """Return the given inputs, and where sizes are dynamic others at two more sizes: the smallest, and one between.

    Numbers are drawn from a seed, with mean and deviation of the given ones; of integers, which may be places in a
    table, only those are drawn that were given.
    """
    cases = [dict(tensors)]
    generator = torch.Generator().manual_seed(seed)
    symbols: dict[str, tuple[int, int]] = {}
    places: dict[tuple[str, int], str] = {}
    for name, axes in dynamic.items():
        for axis, bounds in axes.items():
            *symbol, least, most = bounds
            key = str(symbol[0]) if symbol else f"{name}/{axis}"
            places[name, axis] = key
            size = tensors[name].shape[axis]
            # One of 0 elements would be right whatever the program does.
            smallest = max(int(least), 1)
            between = (smallest + size) // 2
            symbols[key] = (smallest, between if between != size else min(int(most or 2 * size), 2 * size))
    seen = {tuple(tensor.shape for tensor in tensors.values())}
    for which in (0, 1):
        case = {}
        for name, tensor in tensors.items():
            shape = [
                symbols[places[name, axis]][which] if (name, axis) in places else size
                for axis, size in enumerate(tensor.shape)
            ]
            case[name] = _drawn(tensor, shape, generator)
        shapes = tuple(tensor.shape for tensor in case.values())
        if shapes not in seen:
            seen.add(shapes)
            cases.append(case)
    return cases


def _drawn(like: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    values = like.detach().cpu().flatten()
    if like.dtype.is_floating_point and bool(values.double().isfinite().all()):
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        deviation = values.double().std(correction=0) if values.numel() else 1.0
        return (drawn * deviation + values.double().mean()).to(like.dtype).to(like.device)
    places = torch.randint(max(values.numel(), 1), tuple(shape), generator=generator)
    return values[places].to(like.device)


def _reference(
    model: nn.Module, weights: Weights, given: Arguments, cases: Sequence[Case], names: Sequence[str]
) -> tuple[str, list[Case]]:
    """Return the results of the references of all ops, in 64 bits if the model takes them, and the dtype."""
    failed: Exception | None = None
    for dtype in (torch.float64, torch.float32):

        def cast(tensor: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            # Numbers in 8 bits, and subclasses that hold such, are what they are: their scales belong to them.
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
            wide = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
            if plain and tensor.dtype.is_complex:
                return tensor.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
            return tensor.detach().to(dtype) if plain and tensor.dtype in wide else tensor

        held = {name: cast(tensor) for name, tensor in weights.rebuilt(weights.flat).items()}
        outputs = []
        try:
            for case in cases:
                args, kwargs = given.call({name: cast(tensor) for name, tensor in case.items()})
                with kpt_core.use("reference"), torch.no_grad():
                    found = named_results(call_with(model, held, args, kwargs))
                outputs.append({name: tensor.cpu() for name, (_, tensor) in zip(names, found, strict=True)})
        except (RuntimeError, ValueError, TypeError) as error:  # a model may insist on a dtype
            failed = failed or error
            continue
        return str(dtype).removeprefix("torch."), outputs
    raise PackageError(f"the model runs neither in float64 nor in float32 to give a reference: {failed}") from failed


@dataclass(frozen=True)
class TextFacts:
    """What a manifest says of a language model, as it was seen to run."""

    vocabulary: int
    longest: int | None
    datatype: str
    dtypes: tuple[str, ...]
    ops: tuple[str, ...]
    quantized: bool


def write_text_results(folder: Path, tokens: int, seed: int) -> TextFacts:
    """Write the golden results of the language model in a folder, as it runs here, and return what was seen of it."""
    from .text_models import TextModel

    reference = TextModel(folder, "cpu", reference=True)
    count = max(min(tokens, reference.longest or tokens), 2)
    generator = torch.Generator().manual_seed(seed)
    sizes = ((1, count), (2, max(count // 2, 1)))
    cases = [{"input_ids": torch.randint(reference.vocabulary, size, generator=generator)} for size in sizes]
    outputs = [reference(case) for case in cases]
    dtype = reference.dtype
    del reference  # before the model is loaded again
    model = TextModel(folder, "cpu")
    results, _, kernels = run_cases(model, cases, "cpu")
    Golden(cases, outputs, _usual_errors(model, results, cases, outputs, "cpu"), dtype).write(folder)
    return TextFacts(
        model.vocabulary,
        model.longest,
        model.datatype(results[0]["logits"]),
        (*model.dtypes, "int64"),
        tuple(sorted({kernel.partition(" by ")[0] for kernel in kernels})),
        model.quantized,
    )
