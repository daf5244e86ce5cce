"""A backend outside KPT's repository: kernels for an op of its own and for one of kpt-moe."""

import torch

from kpt_core import Kernel

_HERE = "kpt_backend_sample"


class SampleBackend:
    """Serves the CPU."""

    name = "sample"
    device_type = "cpu"

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
                f"{_HERE}.softcap:kernel",
                requires={"simd"},
                unsupported=f"{_HERE}.softcap:unsupported",
            ),
            Kernel("moe.grouped_mm", f"{_HERE}.grouped_mm:grouped_mm", priority=10),
        ]


BACKEND = SampleBackend()
