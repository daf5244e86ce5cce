"""The structures are those of the header: the C compiler and ctypes agree on every size and place."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kpt_backend_cpu import structures
from kpt_backend_cpu.tensors import DTYPES

HEADER = Path(__file__).parents[1] / "native" / "kpt_cpu.h"
COMPILER = next((found for name in ("cc", "c++", "gcc", "clang") if (found := shutil.which(name))), None)
#: Each names its struct in its docstring.
STRUCTURES = {
    (made.__doc__ or "").partition("`struct kpt_")[2].partition("`")[0]: made
    for made in vars(structures).values()
    if isinstance(made, type) and issubclass(made, ctypes.Structure) and made is not ctypes.Structure
}
CONSTANTS = {
    "KPT_CPU_INTERFACE": structures.INTERFACE,
    "KPT_SCALES_NONE": structures.SCALES_NONE,
    "KPT_SCALES_N": structures.SCALES_N,
    "KPT_SCALES_K": structures.SCALES_K,
    "KPT_SCALES_BLOCK": structures.SCALES_BLOCK,
    **{f"KPT_ROUND_{name.upper()}": value for name, value in structures.ROUNDINGS.items()},
    **{f"KPT_{name.upper()}": value for name, value in structures.ACTIVATIONS.items()},
    **{f"KPT_{name.upper()}": value for name, value in structures.SCORES.items()},
    **{f"KPT_{str(dtype).removeprefix('torch.').upper()}": value for dtype, value in DTYPES.items()},
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """What the C compiler says of every structure, field and constant."""
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    asked = {f"struct kpt_{name}": f"sizeof(struct kpt_{name})" for name in STRUCTURES}
    for name, made in STRUCTURES.items():
        for field, *_ in made._fields_:
            asked[f"kpt_{name}.{field} at"] = f"offsetof(struct kpt_{name}, {field})"
            asked[f"kpt_{name}.{field} size"] = f"sizeof(((struct kpt_{name}*)0)->{field})"
    asked |= {name: name for name in CONSTANTS}
    lines = [f'    printf("{name}=%ld\\n", (long)({value}));' for name, value in asked.items()]
    folder = tmp_path_factory.mktemp("layout")
    program = [f'#include "{HEADER}"', "#include <stddef.h>", "#include <stdio.h>", "int main(void) {", *lines, "}"]
    (folder / "layout.c").write_text("\n".join(program) + "\n")
    subprocess.run([COMPILER, "-x", "c", "-std=c11", folder / "layout.c", "-o", folder / "layout"], check=True)
    output = subprocess.run([folder / "layout"], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split("=") for line in output.splitlines())}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_lies_as_the_compiler_lays_it(name, told):
    made = STRUCTURES[name]
    assert ctypes.sizeof(made) == told[f"struct kpt_{name}"]
    for field, kind in made._fields_:
        assert getattr(made, field).offset == told[f"kpt_{name}.{field} at"], field
        assert ctypes.sizeof(kind) == told[f"kpt_{name}.{field} size"], field


def test_constants_are_the_header_s(told):
    assert {name: told[name] for name in CONSTANTS} == CONSTANTS


def test_every_structure_and_kernel_of_the_header_is_there():
    header = HEADER.read_text()
    assert set(re.findall(r"^struct kpt_(\w+) \{", header, re.M)) == set(STRUCTURES)
    kernels = dict(re.findall(r"KPT_EXPORT int (kpt_\w+)\(const struct kpt_(\w+)\*\)", header))
    assert kernels == {
        name: next(known for known, made in STRUCTURES.items() if made is structure)
        for name, structure in structures.KERNELS.items()
    }


def test_dtypes_are_those_that_the_header_names():
    names = re.search(r"enum kpt_dtype \{(.*?)\}", HEADER.read_text(), re.S)
    assert names is not None
    assert {getattr(torch, name.lower()) for name in re.findall(r"KPT_(\w+)", names[1])} == set(DTYPES)


@pytest.mark.parametrize("structure", structures.KERNELS.values(), ids=structures.KERNELS)
def test_packed_numbers_are_the_structure_that_ctypes_makes(structure):
    made, numbers = structure(), []

    def fill(part: ctypes.Structure) -> None:
        for name, kind in part._fields_:
            if issubclass(kind, ctypes.Structure):
                fill(getattr(part, name))
            else:
                numbers.append(len(numbers) + 1)
                setattr(part, name, numbers[-1])

    fill(made)
    assert structures.packed(structure).pack(*numbers) == bytes(made)
