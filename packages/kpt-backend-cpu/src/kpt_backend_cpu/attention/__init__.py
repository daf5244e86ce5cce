"""The kernels for attention. Naming them imports nothing; a kernel's module is imported when it is chosen."""

from kpt_core import Kernel

_DENSE, _PAGED = (f"{__name__}.{each}" for each in ("dense", "paged"))

KERNELS = (
    Kernel(
        "attention.dense",
        forward=f"{_DENSE}:forward",
        backward=f"{_DENSE}:backward",
        unsupported=f"{_DENSE}:unsupported",
        prepare=f"{_DENSE}:prepare",
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        priority=20,
        deterministic=True,
    ),
    Kernel(
        "attention.paged",
        forward=f"{_PAGED}:forward",
        unsupported=f"{_PAGED}:unsupported",
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        priority=20,
        deterministic=True,
    ),
)
