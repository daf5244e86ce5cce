"""A backend outside KPT's repository: kernels for an op of its own and for one of kpt-moe."""

import torch

from kpt_core import Backend, Kernel

_HERE = "kpt_backend_sample"


class SampleBackend(Backend):
    """Serves the CPU."""

    name = "sample"
    device_types = ("cpu",)

    def unavailable(self) -> str | None:
        """A CPU is everywhere; a backend for a device looks for its driver here."""
        return None

    def capabilities(self, device: torch.device) -> frozenset[str]:
        """A backend for a device asks torch or its driver here."""
        return frozenset({"simd"})

    def kernels(self) -> list[Kernel]:
        """Name the kernels by strings: nothing is imported before it is needed."""
        return [
            Kernel("sample.softcap", f"{_HERE}.softcap:tensor_core_kernel", requires={"tensor_cores"}, priority=10),
            Kernel(
                "sample.softcap",
                forward=f"{_HERE}.softcap:kernel",
                backward=f"{_HERE}.softcap:backward",
                requires={"simd"},
                unsupported=f"{_HERE}.softcap:unsupported",
            ),
            Kernel("moe.grouped_mm", forward=f"{_HERE}.grouped_mm:grouped_mm", differentiable=True, priority=10),
        ]


BACKEND = SampleBackend()
