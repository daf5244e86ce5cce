"""Kernels of the backend that the tests add."""

import torch
from torch import Tensor

import kpt_core


@kpt_core.op("clitest.double")
def double(x: Tensor) -> Tensor:
    """Multiply by two.

    Args:
        x: any floating tensor.
    """
    return x * 2


def fast(call: kpt_core.Call) -> Tensor:
    return call.x + call.x


picky = another = fast


def picky_unsupported(call: kpt_core.Call) -> str | None:
    return None if call.x.shape[0] % 8 == 0 else "rows must be a multiple of 8"


def crooked(x: Tensor, y: Tensor) -> Tensor:
    return x


class Backend(kpt_core.Backend):
    """A backend for the CPU, with one kernel of each kind."""

    name = "clitest"
    device_types = ("cpu",)
    extra: tuple[kpt_core.Kernel, ...] = ()

    def capabilities(self, device: torch.device) -> frozenset[str]:
        return frozenset({"bf16"})

    def kernels(self) -> list[kpt_core.Kernel]:
        return [
            kpt_core.Kernel("clitest.double", "cli_kernels:hot", requires={"warp9"}, priority=30),
            kpt_core.Kernel(
                "clitest.double",
                "cli_kernels:fast",
                requires={"bf16"},
                priority=20,
                dtypes={"bfloat16"},
                differentiable=True,
            ),
            kpt_core.Kernel(
                "clitest.double", "cli_kernels:picky", priority=10, unsupported="cli_kernels:picky_unsupported"
            ),
            *self.extra,
        ]
