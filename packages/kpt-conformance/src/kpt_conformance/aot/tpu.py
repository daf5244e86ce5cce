"""Compiling one Pallas kernel for one TPU, with no TPU, and where each number comes from.

`jax.experimental.topologies` describes a TPU that is not there, and libtpu compiles for it.

- shared memory (VMEM): `used_scoped_memory_configs` of the kernel's custom call in the compiled HLO. What does not fit
  is refused by the compiler.
- instructions, spills: the final VLIW bundles of the kernel, which libtpu writes to a folder. Spills are stores of
  vector registers to VMEM for lack of registers, 4 KiB each (8 x 128 lanes of 4 bytes); scalars do not count.
- registers, occupancy: not told; a TPU core runs one program at a time.
"""

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .chips import Chip
from .declared import PallasProgram
from .readings import Reading, find_instructions

_CALL = re.compile(r"%?([\w.-]+) = [^\n]*custom_call_target=\"tpu_custom_call\"[^\n]*")
_VMEM = re.compile(r"\"used_scoped_memory_configs\":\[\{\"memory_space\":\"1\",\"offset\":\"\d+\",\"size\":\"(\d+)\"")
_SPILL = re.compile(r"\bvst\S* \[vmem:\[#allocation\d+_spill\]")
#: `%vmatmul.bf16...`: what a bundle does; names of what it is done for stand in comments.
_OPERATION = re.compile(r"= (v\w[\w.]*)")
_VECTOR_REGISTER = 8 * 128 * 4


def prepare(dump: Path) -> None:
    """Set what libtpu reads when it is first used: no TPU is looked for, and final bundles are written to `dump`."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # it guards a TPU against a second process, and there is none
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(
        (
            os.environ.get("LIBTPU_INIT_ARGS", ""),
            f"--xla_jf_dump_to={dump}",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_dump_llo_pass_label_regex=.*final_bundles.*",
            # jaxlib 0.10.2 can't print programs that give these to SparseCores (v5p, v6e, 7x); kernels are the same.
            *(f"--xla_tpu_enable_offloading_{each}_to_sparsecore=false" for each in ("gather", "scatter", "sort")),
            "--xla_tpu_offload_gather_to_sparsecore=false",
        )
    )


def compile_pallas(program: PallasProgram, chip: Chip, configuration: Mapping[str, Any], dump: Path) -> Reading:
    """Compile and read; `dump`, the folder given to `prepare`, is emptied."""
    from jax.experimental import topologies

    if find_spec("libtpu") is None:  # JAX would say only that it doesn't know the platform
        raise ModuleNotFoundError("libtpu is not installed", name="libtpu")
    for file in dump.iterdir():
        file.unlink()
    devices = topologies.get_topology_desc(str(chip.target), "tpu").devices
    code: str = program.lower(devices, configuration).compile().as_text()
    calls = [(match[1], match[0]) for match in _CALL.finditer(code)]
    bundles = "\n".join(
        file.read_text() for name, _ in calls for file in dump.glob("*-final_bundles.txt") if _is_of(name, file)
    )
    if calls and not bundles:
        raise RuntimeError("libtpu wrote no bundles of the kernel, so its code can't be read; use libtpu 0.0.51")
    used = [int(size) for _, call in calls for size in _VMEM.findall(call)]
    return Reading(
        shared_memory=max(used, default=None) if calls else 0,
        spills=len(_SPILL.findall(bundles)) * _VECTOR_REGISTER,
        instructions=find_instructions(
            "tpu", "\n".join(["tpu_custom_call"] * len(calls) + _OPERATION.findall(bundles))
        ),
    )


def _is_of(call: str, file: Path) -> bool:
    # 1795260246148481355-mm.1-01-final_bundles.txt; beside it lies ...-01-schedule-analysis_final_bundles.txt.
    return re.fullmatch(rf"\d+-{re.escape(call)}-\d+-final_bundles\.txt", file.name) is not None
