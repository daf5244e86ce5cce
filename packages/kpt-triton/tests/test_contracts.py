"""What the contracts say of kernels is said of every chip and of every tile that a kernel may be given."""

import pytest
import torch

from kpt_triton.aot import Program
from kpt_triton.chips import INTEL, multiplied
from kpt_triton.fp8 import scaled_mm
from kpt_triton.moe.contracts import experts, grouped_mm, grouped_mm_wgrad, scaled_grouped_mm
from kpt_triton.moe.decode import decode_down_kernel, decode_up_kernel
from kpt_triton.moe.experts_backward import slope_kernel
from kpt_triton.moe.experts_forward import up_kernel
from kpt_triton.moe.grouped_mm import grouped_mm_kernel
from kpt_triton.moe.launching import codes_of
from kpt_triton.moe.tiles import PRODUCTS, PRODUCTS_OF_CODES, candidate_tiles, default_tile
from kpt_triton.moe.transposed import wgrad_kernel

E4M3 = torch.float8_e4m3fn
CHIPS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", *INTEL)
MODULES = {
    module.__name__: module.AOT for module in (experts, grouped_mm, grouped_mm_wgrad, scaled_grouped_mm, scaled_mm)
}
PROGRAMS = [program for programs in MODULES.values() for program in programs]
#: Products that a kernel is launched for.
KERNELS = {
    "plain": (grouped_mm_kernel,),
    "crowded": (grouped_mm_kernel, up_kernel),
    "pair": (up_kernel,),
    "slope": (slope_kernel,),
    "wgrad": (wgrad_kernel,),
}


def offered(program: Program, chip: str) -> bool:
    return not program.contracts[chip].startswith("not offered: ")


def compiled(product: str, chip: str, kind: str) -> list[tuple[str, dict]]:
    """Launches on a chip of the kernels of a product, by the tile's name, with first operands of a type."""
    return [
        (name, launch)
        for program in PROGRAMS
        if program.function in KERNELS[product] and offered(program, chip)
        if kind in program.signature.get("x", program.signature.get("grad"))
        for name, launch in program.configurations(chip).items()
    ]


@pytest.mark.parametrize("module", MODULES)
def test_names_are_unique(module):
    names = [program.name for program in MODULES[module]]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_each_chip_has_a_contract_and_what_it_speaks_of(program):
    assert program.contracts.keys() == set(CHIPS)
    for chip in CHIPS:
        if offered(program, chip):
            assert program.configurations(chip)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_each_parameter_has_a_type_or_a_value(program):
    parameters = set(program.function.arg_names)
    assert program.signature.keys() <= parameters
    for chip in filter(lambda chip: offered(program, chip), CHIPS):
        for launch in program.configurations(chip).values():
            assert not launch.keys() & program.signature.keys()
            assert parameters <= launch.keys() | program.signature.keys()
            assert launch["enable_fp_fusion"] is True


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_each_tile_is_compiled(product, chip):
    for itemsize, kind in ((2, "bf16"), (4, "fp32")):
        names = [name for name, _ in compiled(product, chip, kind)]
        tiles = {
            default_tile(product, chip, itemsize, rows, 1, aligned)
            for rows in (1, 16, 17, 32, 33, 64, 65, 4096)
            for aligned in (True, False)
        }
        if itemsize == 2:
            tiles.update(candidate_tiles(product, chip))
        missing = [str(tile) for tile in tiles if not any(name.endswith(str(tile)) for name in names)]
        assert missing == []


@pytest.mark.parametrize("chip", [chip for chip in CHIPS if E4M3 in multiplied(chip)])
@pytest.mark.parametrize("product", PRODUCTS_OF_CODES)
def test_each_tile_of_codes_is_compiled_as_the_chip_multiplies_them(product, chip):
    how = codes_of(E4M3, E4M3, "n", torch.bfloat16, chip)
    # Activations are rounded for so many rows that a tile is 64 high.
    of_experts = product == "pair_codes"
    found = {
        name
        for program in (experts.AOT if of_experts else scaled_grouped_mm.AOT)
        if offered(program, chip)
        for name, launch in program.configurations(chip).items()
        if launch.get("CODES") == how
    }
    for rows in (33, 65) if of_experts else (1, 17, 33, 65):
        for aligned in (True, False):
            assert str(default_tile(product, chip, 1, rows, 1, aligned)) in found


@pytest.mark.parametrize("chip", [chip for chip in CHIPS if E4M3 not in multiplied(chip)])
def test_codes_are_compiled_for_no_chip_without_units_for_them(chip):
    assert not any(
        launch["CODES"]
        for program in scaled_grouped_mm.AOT
        if offered(program, chip)
        for launch in program.configurations(chip).values()
    )


@pytest.mark.parametrize("chip", CHIPS)
def test_a_tile_by_descriptors_is_compiled_with_descriptors(chip):
    for product in PRODUCTS:
        for name, launch in compiled(product, chip, "bf16"):
            assert (" tma" in name) == (launch.get("LAYOUT", "") != "")
            assert name.endswith(" ws") == launch.get("SPECIALIZE", False)


def test_each_branch_of_a_kernel_is_compiled():
    kernels = {grouped_mm_kernel, up_kernel, slope_kernel, wgrad_kernel, decode_up_kernel, decode_down_kernel}
    for chip in CHIPS[2:6]:
        for kernel in kernels:
            values: dict[str, set[object]] = {}
            for program in PROGRAMS:
                if program.function is kernel and offered(program, chip):
                    for launch in program.configurations(chip).values():
                        for name, value in launch.items():
                            values.setdefault(name, set()).add(value)
            alone = {name for name, found in values.items() if isinstance(next(iter(found)), bool) and len(found) < 2}
            assert alone <= {"enable_fp_fusion", "SPECIALIZE"} | ({"X_DESCRIPTOR"} if chip == "sm89" else set())
            if "SCALE" in values:
                assert {"n", "block"} <= values["SCALE"] | ({"n"} if kernel is slope_kernel else set())
            if "X_SCALE" in values:
                assert values["X_SCALE"] == {"", "row", "block"}


def test_each_activation_is_compiled_on_one_chip():
    for kernel in (up_kernel, slope_kernel):
        launches = (p.configurations("sm90").values() for p in PROGRAMS if p.function is kernel and offered(p, "sm90"))
        assert {launch["NAME"] for of_program in launches for launch in of_program} == {
            "swiglu", "geglu", "geglu_tanh", "reglu", "silu", "gelu", "gelu_tanh", "relu", "relu2",
        }  # fmt: skip
