"""The tuning tables that the package ships hold for the kernels that it offers."""

import warnings
from importlib.resources import files
from pathlib import Path

import pytest

from kpt_backend_nvidia import BACKEND
from kpt_optimize.tuning.files import read_table
from kpt_optimize.tuning.tables import table_name
from kpt_triton.tile import Tile

pytest.importorskip("kpt_moe")

TABLES = sorted(Path(str(files("kpt_backend_nvidia"))).glob("tuning/*.json"))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_every_entry_is_of_a_kernel_that_is_offered(table: Path) -> None:
    device = table.stem.replace("_", " ")
    assert table.name == table_name(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entries, faults = read_table(table, device)
    assert entries
    assert not faults
    targets = {kernel.forward for kernel in BACKEND.kernels()} | {"kpt_moe.torch_kernels.experts_grouped:forward"}
    for entry in entries:
        assert entry.kernel.rpartition("/")[2] in targets
        for tile in (entry.config or {}).values():
            assert not tile or str(Tile.parse(tile)) == tile


def test_the_table_is_found_where_the_backend_says() -> None:
    package, _, folder = BACKEND.tuning.partition(":")
    assert TABLES
    assert {table.parent for table in TABLES} == {Path(str(files(package).joinpath(folder)))}
