"""A record, and a package with an op and kernels, written to a folder so that a test may change its files."""

import dataclasses
import textwrap
from pathlib import Path

from kpt_core.evidence import Level, Record
from kpt_core.evidence.record import hash_of

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
    "evidence_pkg/cases.py": """
        import torch

        from kpt_core.cases import Case, CaseTable


        def build(generator, rows=4):
            return {"x": torch.randn(rows, 3, generator=generator, dtype=torch.float64)}


        TABLE = CaseTable(op="evidence.double", build=build, cases=(Case(name="small"),), gradients=("x",))
    """,
    "evidence_pkg/backend.py": """
        import json
        from pathlib import Path

        from kpt_core import Backend, Kernel, KptError

        LIBRARY = Path(__file__).with_name("library.json")


        class Evident(Backend):
            name = "evident"
            device_types = ("cpu",)
            offered = (
                Kernel(
                    "evidence.double",
                    forward="evidence_pkg.fast:fast",
                    backward="evidence_pkg.back:fast_backward",
                    requires={"bf16"},
                    dtypes={"float32", "bfloat16"},
                    unsupported="evidence_pkg.refusal:unsupported",
                    priority=5,
                    deterministic=True,
                ),
                Kernel("evidence.double", "evidence_pkg.interpreted:interpreted"),
            )

            def capabilities(self, device):
                return frozenset({"bf16"})

            def kernels(self):
                return self.offered

            def library(self):
                if not LIBRARY.exists():
                    return {}
                told = json.loads(LIBRARY.read_text())
                if told.pop("junk", None):
                    raise KptError("the library has not the bytes that its build wrote down: install it again")
                return told
    """,
}


def write_package(folder: Path) -> None:
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text).lstrip("\n"))


RAN_WITH = {"torch": "2.13.0"}

RECORD = Record(
    op="moe.experts",
    kernel="somewhere.moe:experts",
    backend="acme",
    chip="Chip 9 (fast)",
    device="acme",
    level=Level.RAN,
    hashes=dict.fromkeys(("kernel", "contract", "suite"), "0123456789abcdef" * 4) | {"library": hash_of(RAN_WITH)},
    ran_with=RAN_WITH,
    versions={"python": "3.11.7"},
    date="2026-11-21T09:30:00Z",
    commit="2a102e8783e6",
    passed=412,
    refused=2,
    outcomes="r" + "p" * 412 + "r",
    absent=({"check": "vmapped", "dtypes": ["float32"], "refused": 2, "skipped": 0, "reason": "refused: vmap"},),
    details={"registers": 168},
)


def replaced(**values):
    return dataclasses.replace(RECORD, **values)
