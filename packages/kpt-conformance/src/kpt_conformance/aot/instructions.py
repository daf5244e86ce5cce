"""The instructions that a contract may name, and how they look in the code that is read."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from .chips import Vendor

#: By vendor and name in a contract: the instruction as a regular expression, without what follows it in its name.
#: NVIDIA's are of PTX, AMD's of the assembly, a TPU's of HLO (`mosaic`) and of the final bundles.
FAMILIES: Mapping[Vendor, Mapping[str, str]] = {
    "nvidia": {
        "wgmma": r"wgmma\.mma_async",
        "tcgen05": r"tcgen05\.mma",
        "mma.sync": r"mma\.sync",
        "tma": r"cp\.async\.bulk\.tensor",
        "cp.async": r"cp\.async\.c[ag]",
        "setmaxnreg": r"setmaxnreg",
        "ldmatrix": r"ldmatrix",
        "stmatrix": r"stmatrix",
    },
    "amd": {
        "v_mfma": r"v_mfma",
        "v_smfmac": r"v_smfmac",
        "v_wmma": r"v_wmma",
        "v_swmmac": r"v_swmmac",
        "v_dot": r"v_dot\d",
        "load_lds": r"(?:global|buffer)_load_lds",
        "buffer_load": r"buffer_load",
        "global_load": r"global_load",
        "ds_read_tr": r"ds_(?:read|load)_(?:b\d+_)?tr",
    },
    "tpu": {
        "mosaic": r"tpu_custom_call",
        "mxu": r"vmatmul",
    },
}


def find_instructions(vendor: Vendor, code: str) -> dict[str, int]:
    """How often each instruction of a family stands in `code`, by its full name."""
    families = "|".join(FAMILIES[vendor].values())
    names = re.findall(rf"(?<![\w.])(?:{families})[\w.:]*", code)
    return dict(sorted(Counter(names).items()))


def count(vendor: Vendor, family: str, instructions: Mapping[str, int], of_type: str | None = None) -> int:
    """How many instructions of a family there are; with `of_type`, those that have it in their name (`bf16`)."""
    pattern = FAMILIES[vendor][family]
    return sum(
        number
        for name, number in instructions.items()
        if re.match(pattern, name) and (of_type is None or _has_type(name, of_type))
    )


def families_in(vendor: Vendor, instructions: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """The families that occur, with their numbers."""
    for family in FAMILIES[vendor]:
        number = count(vendor, family, instructions)
        if number:
            yield family, number


def _has_type(name: str, of_type: str) -> bool:
    # `f16` is not to be found in `bf16`, but in `v_mfma_f32_32x32x8f16`.
    return re.search(rf"(?<![a-z]){re.escape(of_type)}(?![0-9])", name) is not None
