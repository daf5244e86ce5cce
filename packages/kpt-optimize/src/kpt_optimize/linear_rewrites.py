"""The lossless rewrite of linear layers: they compute few rows at memory's rate."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from .few_rows import FewRowsLinear
from .rewrite import Site
from .trial import RejectedError


@dataclass(frozen=True)
class FewRows:
    """Make an `nn.Linear` a `FewRowsLinear`; it is kept where the example inputs have few rows and it is faster."""

    name: str = "linear.few_rows"
    lossless: bool = True
    level: str = "conservative"

    def sites(self, model: nn.Module) -> Iterator[Site]:
        """Yield every plain linear layer, once."""
        for path, module in model.named_modules():
            if path and type(module) is nn.Linear and "forward" not in vars(module):
                yield Site(path, "linear.dense")

    def replacement(self, module: nn.Module) -> nn.Module:
        """Return the twin."""
        if type(module) is not nn.Linear:
            raise RejectedError(f"another rewrite had put {type(module).__name__} in its place already")
        return FewRowsLinear.from_linear(module)


REWRITES = (FewRows(),)
