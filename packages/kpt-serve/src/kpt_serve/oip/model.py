"""A package that is loaded to be served: what it runs, whether its rows are independent, whether it still is right."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kpt_serve.errors import PackageError
from kpt_serve.package import Manifest
from kpt_serve.package.golden import Golden, load_model, verify_model

_LOG = logging.getLogger("kpt_serve")


class WrongResultsError(PackageError):
    """A package gives other results here than its golden ones."""


class Model:
    """Load a package, prove its golden results, and run it.

    Args:
        folder: The package, whose files were checked.
        manifest: Its manifest.
        device_type: Where it runs.

    Attributes:
        golden: An input whose results are known.

    Raises:
        PackageError: It can't be loaded.
        WrongResultsError: Its golden results are wrong here.
    """

    def __init__(self, folder: Path, manifest: Manifest, device_type: str) -> None:
        self._device_type = device_type
        self._run = load_model(folder, manifest, device_type)
        report = verify_model(self._run, folder, manifest, device_type)
        if not report.passed:
            raise WrongResultsError(f"{folder} gives wrong results on this machine:\n{report}")
        self.report = report
        self._allowed = {each.name: each.mean_allowed for each in report.errors}
        self.golden = Golden.read(folder).inputs[0]
        self._expected = self(self.golden)

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the results on the CPU, row by row; the model runs in the calling thread."""
        there = {name: tensor.to(self._device_type) for name, tensor in inputs.items()}
        return {name: tensor.cpu().contiguous() for name, tensor in self._run(there).items()}

    def is_right(self) -> bool:
        """Return whether the golden input still gives what it gave when the model was loaded; it runs here."""
        try:
            return self.is_golden(self(self.golden))
        except Exception:
            _LOG.exception("the golden input fails")
            return False

    def is_golden(self, results: Mapping[str, Tensor]) -> bool:
        """Return whether results are those of the golden input."""
        return self._alike(results, self._expected)

    def rows(self, manifest: Manifest, most: int) -> int:
        """Return how many rows of several requests may run in one call: at most `most`, 1 if rows are not independent.

        They are where each input and output has a dynamic first dimension, and the golden rows give the same results
        with other rows behind them.
        """
        bounds = [most]
        for each in (*manifest.inputs, *manifest.outputs):
            first = next((dimension for dimension in each.dynamic if dimension.axis == 0), None)
            if first is None:
                return 1
            bounds += [first.max] if first.max is not None else []
        most = min(bounds)
        counts = {len(tensor) for tensor in (*self.golden.values(), *self._expected.values())}
        if len(counts) > 1 or most < 2:
            return 1
        count = min(*counts, most - 1)
        first_rows = {name: tensor[:count] for name, tensor in self.golden.items()}
        # Other rows than those, or what depends on all of them could be the same.
        more = {name: _halved(tensor[:1]) for name, tensor in first_rows.items()}
        try:
            alone, other = self(first_rows), self(more)
            together = self({name: torch.cat([tensor, more[name]]) for name, tensor in first_rows.items()})
        except PackageError as error:
            _LOG.warning("requests are not joined: the model fails for more rows: %s", error)
            return 1
        if self._alike(together, {name: torch.cat([tensor, other[name]]) for name, tensor in alone.items()}):
            return most
        _LOG.warning("requests are not joined: the results of a row depend on the other rows of a call")
        return 1

    def by_row(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the results of each row as it is computed alone, so that its bits depend on nothing else."""
        count = len(next(iter(inputs.values())))
        rows = [self({name: tensor[row : row + 1] for name, tensor in inputs.items()}) for row in range(count)]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def _alike(self, found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
        """Return whether results differ by no more than two that the golden results allow.

        Bits differ, since kernels are chosen by sizes and sum in other orders.
        """
        return all(_distance(found[name], right[name]) <= 2 * allowed for name, allowed in self._allowed.items())


def _distance(found: Tensor, right: Tensor) -> float:
    """Return the mean error, in multiples of the mean size; infinity for another shape."""
    if found.shape != right.shape:
        return math.inf
    one, other = found.double(), right.double()
    same = (one == other) | (one.isnan() & other.isnan())
    error = torch.where(same, torch.zeros_like(one), (one - other).abs())
    finite = other[other.isfinite()].abs()
    return float(error.mean()) / (float(finite.mean()) if finite.any() else 1.0) if error.numel() else 0.0


def _halved(tensor: Tensor) -> Tensor:
    return tensor / 2 if tensor.dtype.is_floating_point else tensor
