"""The largest magnitude, or a histogram of magnitudes in bounded memory, and the scales that they suggest."""

import torch
from torch import Tensor

from kpt_core import InputError, UnknownNameError

from .formats import FORMATS
from .scales import LEAST

_BINS = 2048
#: Numbers counted at once: float32, in which torch counts, holds no more of them in a bin.
_COUNTED = 1 << 24
#: How a scale is chosen: by the largest magnitude, by a share of all magnitudes, or by the least squared error.
METHODS = ("max", "percentile", "mse")
#: Clipping points that `mse` tries, as parts of the largest magnitude.
_CANDIDATES = 64
_MOST = torch.finfo(torch.float32).max
_NOTHING = "calibration: no finite number was seen; expected some: check the data and the model"


class Largest:
    """The largest of the finite magnitudes that it is shown. It stays on their device, which nothing here waits for."""

    def __init__(self) -> None:
        # Beside the magnitude 1, if any number was finite.
        self._seen: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Look at the numbers of a floating tensor; NaN and infinity are left out, also what float32 can't hold."""
        magnitude = (x.detach().to(torch.float32) if x.dtype is torch.float64 else x.detach()).abs()
        if magnitude.numel() == 0:
            return
        finite = magnitude.isfinite()
        own = torch.stack((torch.where(finite, magnitude, 0).max().float(), finite.any().float()))
        self._seen = own if self._seen is None else torch.maximum(self._seen.to(own.device), own)

    @property
    def any(self) -> bool:
        """Tell whether a finite number was seen."""
        return self._seen is not None and bool(self._seen[1])

    def scale(self, dtype: torch.dtype) -> float:
        """What to divide such numbers by, one for all, so that the largest fits codes of `dtype`."""
        if self._seen is None or not self.any:
            raise InputError(_NOTHING)
        return _scale(float(self._seen[0]), dtype)


class Magnitudes:
    """Count finite magnitudes in bins of one width, zeros too, and tell the largest, `most`, and how many, `count`.

    Where a larger number comes, the width doubles as often as is needed, and two bins become one: what was counted
    stays exact up to a bin, and nothing is kept but the counts.
    """

    def __init__(self) -> None:
        self.most = 0.0
        self.count = 0
        self._top = 0.0
        self._counts = torch.zeros(_BINS, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        """Count the numbers of a floating tensor, on any device; NaN and infinity are left out."""
        magnitude = x.detach().to(torch.float32).abs().flatten()
        magnitude = magnitude[magnitude.isfinite()].cpu()
        if magnitude.numel() == 0:
            return
        most = float(magnitude.amax())
        self.most, self.count = max(self.most, most), self.count + magnitude.numel()
        if most > self._top:
            self._widen(most)
        if self._top == 0:
            self._counts[0] += magnitude.numel()
        else:
            # Twice the largest number can be too much for float32.
            wide = magnitude.double() if self._top > _MOST else magnitude
            for part in wide.split(_COUNTED):
                self._counts += torch.histc(part, _BINS, 0, self._top).double()

    def _widen(self, most: float) -> None:
        if self._top == 0:
            zeros = self._counts[0].clone()
            self._top = most
            self._counts[0] = zeros
            return
        while self._top < most:
            self._top *= 2.0
            pairs = self._counts.view(-1, 2).sum(1)
            self._counts = torch.cat((pairs, torch.zeros_like(pairs)))

    @property
    def any(self) -> bool:
        """Tell whether a finite number was seen."""
        return self.count > 0

    def percentile(self, percent: float) -> float:
        """The magnitude that so many percent of all do not exceed, up to the width of a bin."""
        wanted = self._counts.cumsum(0) >= percent / 100 * self._counts.sum()
        edge = (int(wanted.int().argmax()) + 1) / _BINS * self._top
        return min(edge, self.most)

    def least_error(self, dtype: torch.dtype) -> float:
        """The magnitude to clip at, so that the mean squared error of the quantised magnitudes is least."""
        centres = ((torch.arange(_BINS, dtype=torch.float32) + 0.5) / _BINS * self._top).clamp(max=self.most)
        form, best, error = FORMATS[dtype], self.most, float("inf")
        for part in range(_CANDIDATES, _CANDIDATES // 4, -1):
            clip = self.most * part / _CANDIDATES
            scale = clip / form.most
            rounded = (centres / scale).clamp(max=form.most).to(dtype).to(torch.float32) * scale
            found = float((self._counts * (rounded - centres).double().square()).sum())
            if found < error:
                best, error = clip, found
        return best

    def scale(self, dtype: torch.dtype, method: str = "max", percent: float = 99.99) -> float:
        """Return what to divide such numbers by, one for all; raise unless some were counted."""
        check_method(method, percent)
        if self.count == 0:
            raise InputError(_NOTHING)
        found = {
            "max": lambda: self.most,
            "percentile": lambda: self.percentile(percent),
            "mse": lambda: self.least_error(dtype),
        }[method]()
        return _scale(found, dtype)


def _scale(most: float, dtype: torch.dtype) -> float:
    return max(most / FORMATS[dtype].most, LEAST) if most else 1.0


def check_method(method: str, percent: float) -> None:
    """Raise unless scales can be chosen so."""
    if method not in METHODS:
        raise UnknownNameError("calibration method", method, METHODS)
    if not 0 < percent <= 100:
        raise InputError(f"calibration: percentile must be above 0 and up to 100; got {percent}")
