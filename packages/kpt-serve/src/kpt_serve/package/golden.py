"""Golden results: what a package's model gives for known inputs in 64 bits, and the check that it still does.

`python -m kpt_serve.package.golden DIR` checks a package: 0 right, 1 wrong results, 2 a bad package or machine. Files
and versions are checked before torch is imported.
"""

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kpt_serve.errors import PackageError

from .checking import check, check_machine
from .manifest import Manifest
from .signing import verify_signature

if TYPE_CHECKING:
    from torch import Tensor

FILE = "golden.safetensors"
RIGHT, WRONG, BAD = 0, 1, 2
Case = dict[str, "Tensor"]
Run = Callable[[Mapping[str, "Tensor"]], Mapping[str, "Tensor"]]


@dataclass(frozen=True)
class OutputError:
    """How far an output is from the reference: in multiples of the mean size of the reference's numbers.

    Attributes:
        name: Of the output.
        mean: Mean error over all golden inputs.
        largest: Largest error.
        mean_allowed: What the exporter's own error and the manifest's tolerance allow.
        largest_allowed: Likewise.
    """

    name: str
    mean: float
    largest: float
    mean_allowed: float
    largest_allowed: float

    @property
    def passed(self) -> bool:
        """Whether both errors are within what is allowed; a NaN is not."""
        return self.mean <= self.mean_allowed and self.largest <= self.largest_allowed


@dataclass(frozen=True)
class Report:
    """What a package gave for its golden inputs.

    Attributes:
        name: Of the package.
        device_type: Where it ran.
        reference: The dtype of the reference.
        sizes: Of the inputs of each golden case.
        seconds: That each case took, the first call at that size.
        errors: Of each output.
        kernels: How often each kernel served an op: `moe.experts by cpu/moe.experts/package.module:function`.
    """

    name: str
    device_type: str
    reference: str
    sizes: tuple[str, ...]
    seconds: tuple[float, ...]
    errors: tuple[OutputError, ...]
    kernels: Mapping[str, int]

    @property
    def passed(self) -> bool:
        """Whether every output is near enough to the reference."""
        return all(error.passed for error in self.errors)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: null."""
        document = asdict(self)
        for error in document["errors"]:
            error |= {key: None for key, value in error.items() if key != "name" and not math.isfinite(value)}
        return {**document, "passed": self.passed}

    def __str__(self) -> str:
        lines = [f"{self.name} on {self.device_type}, against a reference in {self.reference}"]
        lines += [f"  {sizes}: {seconds:.3f} s" for sizes, seconds in zip(self.sizes, self.seconds, strict=True)]
        for each in self.errors:
            verdict = "right" if each.passed else "WRONG"
            mean = f"mean error {each.mean:.2e} (allowed {each.mean_allowed:.2e})"
            lines.append(
                f"  {each.name}: {verdict}; {mean}, largest {each.largest:.2e} (allowed {each.largest_allowed:.2e})"
            )
        lines += [f"  {kernel}: {calls} calls" for kernel, calls in sorted(self.kernels.items())]
        return "\n".join(lines)


def verify(folder: str | os.PathLike[str], *, device_type: str = "cpu") -> Report:
    """Check a package, run its golden inputs, and return how far the results are from the reference.

    Args:
        folder: The package. A signature is another's to check.
        device_type: Where to run.

    Raises:
        PackageError: A file was changed, this machine lacks what the package needs, or the model can't be run.
    """
    manifest = Manifest.read(folder)
    check(folder, manifest)
    check_machine(manifest, device_type=device_type)
    return verify_model(load_model(folder, manifest, device_type), folder, manifest, device_type)


def load_model(folder: str | os.PathLike[str], manifest: Manifest, device_type: str) -> Run:
    """Return the model of a package whose files were checked.

    Raises:
        PackageError: The device lacks a dtype, or the model can't be loaded.
    """
    check_machine(manifest, device_type=device_type, capabilities=_dtypes_of(manifest, device_type))
    if manifest.kind == "program":
        from .weights import Program

        return Program(folder, manifest, device_type)
    from .text_models import TextModel

    return TextModel(folder, device_type)


def verify_model(run: Run, folder: str | os.PathLike[str], manifest: Manifest, device_type: str) -> Report:
    """Run the golden inputs of a package through its model, and return how far the results are from the reference."""
    golden = Golden.read(folder)
    results, seconds, kernels = run_cases(run, golden.inputs, device_type)
    errors = []
    for name, (mean, largest) in errors_of(results, golden.outputs).items():
        if name not in golden.errors:
            raise PackageError(f"{folder}: {FILE} has no output {name!r}; copy the package again")
        own_mean, own_largest = golden.errors[name]
        least = max(_rounding(case[name]) for case in results)
        # An exporter without any error, in 64 bits say, would allow no other kernel: a rounding is always allowed.
        mean_allowed = max(own_mean * manifest.tolerance.mean, least)
        largest_allowed = max(own_largest * manifest.tolerance.max, 8 * least)
        errors.append(OutputError(name, mean, largest, mean_allowed, largest_allowed))
    names = [each.name for each in manifest.inputs]
    sizes = tuple(_sizes({name: case[name] for name in names}) for case in golden.inputs)
    return Report(manifest.name, device_type, golden.reference, sizes, seconds, tuple(errors), kernels)


def _sizes(case: Case) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, tensor.shape)) or 'scalar'}" for name, tensor in case.items())


def _dtypes_of(manifest: Manifest, device_type: str) -> set[str]:
    """Return the dtypes of a manifest in which this device can hold numbers and read them."""
    import torch

    found = set()
    for name in manifest.dtypes:
        dtype = getattr(torch, name, None)
        try:
            if isinstance(dtype, torch.dtype):
                torch.zeros(1, device=device_type).to(dtype).to(torch.float32)
                found.add(name)
        except (RuntimeError, NotImplementedError, AssertionError, TypeError):
            continue
    return found


@dataclass(frozen=True)
class Golden:
    """Known inputs and their results.

    Attributes:
        inputs: Of each case.
        outputs: Of the reference.
        errors: Mean and largest error of each output where the package was written, see `references`.
        reference: The dtype of the reference.
    """

    inputs: Sequence[Case]
    outputs: Sequence[Case]
    errors: Mapping[str, tuple[float, float]]
    reference: str

    def write(self, folder: Path) -> None:
        """Write the file."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = {}
        for number, (inputs, outputs) in enumerate(zip(self.inputs, self.outputs, strict=True)):
            for kind, case in (("input", inputs), ("output", outputs)):
                for name, tensor in case.items():
                    tensors[f"{number}/{kind}/{name}"] = tensor.detach().cpu().clone().contiguous()
        errors = {name: list(each) for name, each in self.errors.items()}
        # One text: safetensors writes several in an order of chance.
        about = json.dumps({"errors": errors, "reference": self.reference}, sort_keys=True)
        path = folder / FILE
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file(tensors, path, {"golden": about})
        except SafetensorError as error:  # its name for a full disk
            raise PackageError(f"{path} can't be written: {error}; make room, or choose another place") from error
        path.chmod(mode)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Golden":
        """Return the golden results of a package.

        Raises:
            PackageError: There are none, or the file is no such file.
        """
        from safetensors import SafetensorError, safe_open

        path = Path(folder, FILE)
        inputs: dict[int, Case] = {}
        outputs: dict[int, Case] = {}
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["golden"])
                for key in file.keys():  # noqa: SIM118  it is no mapping
                    number, kind, name = key.split("/", 2)
                    {"input": inputs, "output": outputs}[kind].setdefault(int(number), {})[name] = file.get_tensor(key)
            errors = {name: (float(mean), float(most)) for name, (mean, most) in about["errors"].items()}
            reference = str(about["reference"])
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise PackageError(
                f"{path} holds no golden results ({type(error).__name__}: {error}); expected inputs and outputs: copy "
                "the package again, or export the model again"
            ) from error
        if not outputs or inputs.keys() != outputs.keys():
            raise PackageError(f"{path} has inputs and outputs of different cases, or none; export the model again")
        order = sorted(inputs)
        return cls([inputs[each] for each in order], [outputs[each] for each in order], errors, reference)


def run_cases(
    run: Run, cases: Sequence[Case], device_type: str
) -> tuple[list[Case], tuple[float, ...], dict[str, int]]:
    """Return the results, seconds and kernels of each case."""
    import kpt_core

    results, seconds = [], []
    calls: Counter[str] = Counter()
    for case in cases:
        inputs = {name: tensor.to(device_type) for name, tensor in case.items()}
        start = time.perf_counter()
        with kpt_core.record() as log:
            # Read at once: devices go on computing.
            results.append({name: tensor.detach().cpu() for name, tensor in run(inputs).items()})
        seconds.append(time.perf_counter() - start)
        calls.update(f"{each.op} by {each.identity}" for each in log)
    return results, tuple(seconds), dict(calls)


def errors_of(results: Sequence[Mapping[str, "Tensor"]], expected: Sequence[Case]) -> dict[str, tuple[float, float]]:
    """Return the mean and the largest error of each output, in multiples of the mean size of its reference."""
    import torch

    found = {}
    for name in expected[0]:
        errors, sizes = [], []
        for case, right in zip(results, expected, strict=True):
            if name not in case or case[name].shape != right[name].shape:
                there = list(case[name].shape) if name in case else "nothing"
                raise PackageError(f"output {name!r} is {there}; the golden one is {list(right[name].shape)}")
            one, other = case[name].double().flatten(), right[name].double().flatten()
            # Infinities, of a mask say, are right where both are the same.
            errors.append(torch.where(one == other, torch.zeros_like(one), (one - other).abs()))
            sizes.append(other[other.isfinite()].abs())
        every, size = torch.cat(errors), torch.cat(sizes)
        scale = float(size.mean()) if size.numel() else 0.0
        scale = scale or 1.0
        found[name] = (float(every.mean()) / scale, float(every.max()) / scale) if every.numel() else (0.0, 0.0)
    return found


def _rounding(tensor: "Tensor") -> float:
    import torch

    return torch.finfo(tensor.dtype).eps if tensor.dtype.is_floating_point else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the package in a folder, print the report, and return the exit code."""
    parser = argparse.ArgumentParser("python -m kpt_serve.package.golden", description=main.__doc__)
    parser.add_argument("folder", metavar="DIR", help="the package")
    parser.add_argument("--device", default="cpu", help="where to run, as cuda")
    parser.add_argument("--key", help="the public key that its signature must fit")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    try:
        if options.key is not None:
            verify_signature(options.folder, options.key)
        report = verify(options.folder, device_type=options.device)
    except PackageError as error:
        sys.stderr.write(f"error: {error}\n")
        return BAD
    sys.stdout.write(f"{json.dumps(report.as_dict(), indent=2) if options.json else report}\n")
    return RIGHT if report.passed else WRONG


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    sys.exit(main())
