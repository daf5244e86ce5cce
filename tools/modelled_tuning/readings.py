"""What the compile matrix read of each tile, from the page that it writes (docs/kernels.md)."""

import re
from pathlib import Path

from kpt_triton.moe.roofline import Compiled
from kpt_triton.tile import Tile

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"

#: Product to the op's section and the programs of 16-bit numbers that launch it. The down projection of experts is the
#: plain product but for its weights: read alike, its tiles are compared fairly. Tiles with descriptors are left out, as
#: the model doesn't know what those gain.
_PROGRAMS = {
    "plain": ("moe.grouped_mm", ("bf16", "bf16, few rows")),
    "pair": ("moe.experts", ("up bf16", "up bf16, few rows")),
    "slope": ("moe.experts", ("slope bf16", "slope bf16, few rows")),
    "wgrad": ("moe.grouped_mm_wgrad", ("bf16",)),
}
_CELL = re.compile(r"\d+ r, (?:\d+ KiB, )?(\d+)/\d+(?:, (\d+) B of spills)?")

#: By product and chip: what each tile became.
Readings = dict[tuple[str, str], dict[Tile, Compiled]]


def read_page(path: Path = PAGE) -> Readings:
    """All tiles of 16-bit products.

    Raises:
        ValueError: the page has no reading of some product.
    """
    products = {(op, program): product for product, (op, programs) in _PROGRAMS.items() for program in programs}
    found: Readings = {}
    op = ""
    chips: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            op = line.removeprefix("## ").strip("`")
        if not line.startswith("| "):
            continue
        program, configuration, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if program == "program":
            chips = cells
        product = products.get((op, program))
        if product is not None:
            for chip, cell in zip(chips, cells, strict=True):
                if (match := _CELL.fullmatch(cell)) is not None:
                    compiled = Compiled(occupancy=int(match[1]), spills=int(match[2] or 0))
                    found.setdefault((product, chip), {})[Tile.parse(configuration)] = compiled
    missing = sorted(_PROGRAMS.keys() - {product for product, _ in found})
    if missing:
        raise ValueError(f"{path} has no reading of {', '.join(missing)}: has its form changed?")
    return found
