"""A record, and a package with an op and kernels, written to a folder so that a test may change its files."""

import dataclasses
import textwrap
from pathlib import Path

from kpt_conformance.evidence import Level, Record

FILES = {
    "evidence_pkg/__init__.py": "from .everything import nothing\n",
    "evidence_pkg/everything.py": "nothing = None\n",
    "evidence_pkg/double.py": """
        import torch

        from kpt_core import op

        from .deep import factor


        @op("evidence.double")
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * factor()
    """,
    "evidence_pkg/fast.py": """
        import torch

        def fast(call) -> torch.Tensor:
            from evidence_pkg.inner import deeper
            return deeper.twice(call.x)
    """,
    "evidence_pkg/back.py": "def fast_backward(call, saved, grad): return {'x': 2 * grad}\n",
    "evidence_pkg/refusal.py": "def unsupported(call): return None\n",
    "evidence_pkg/interpreted.py": """
        def interpreted(call):
            from .inner.tritonic import kernel
            return call.x * 2
    """,
    "evidence_pkg/inner/__init__.py": "",
    "evidence_pkg/inner/deeper.py": "from kpt_core import InputError\n\ndef twice(x): return x + x\n",
    "evidence_pkg/inner/tritonic.py": "import triton.language as tl\nkernel = None\n",
    "evidence_pkg/deep.py": "def factor(): return 2\n",
}


def write_package(folder: Path) -> None:
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text).lstrip("\n"))


RECORD = Record(
    op="moe.experts",
    kernel="somewhere.moe:experts",
    backend="acme",
    chip="Chip 9 (fast)",
    level=Level.RAN,
    source="0123456789abcdef" * 4,
    versions={"python": "3.11.7"},
    date="2026-11-21T09:30:00Z",
    commit="2a102e8783e6+changes",
    checks=412,
    expected_failures=3,
    details={"registers": 168},
)


def replaced(**values):
    return dataclasses.replace(RECORD, **values)
