"""Shipped tuning tables on the devices that they are for: CUDA is simulated, and nothing is computed."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import kpt_core
from kpt_backend_nvidia import BACKEND
from kpt_backend_nvidia.chips import chip_name
from kpt_core.dispatch.choice import choose
from kpt_core.tuning.files import TuningEntry, read_table
from kpt_core.tuning.tables import table_name
from kpt_triton.moe.tiles import candidate_tiles
from kpt_triton.tile import Tile
from simulated_cuda import FakeDevice, simulate

FOLDER = Path(str(files("kpt_backend_nvidia").joinpath("tuning")))
NAMES = [json.loads(path.read_text())["device"] for path in sorted(FOLDER.glob("*.json"))]
CUDA = torch.device("cuda", 0)
#: What the tiles of a configuration are of.
PRODUCTS = {"up": "pair", "down": "plain", "slope": "slope", "wgrad": "wgrad", "tile": "plain"}


def capability_of(name: str) -> tuple[int, int]:
    if "B200" in name:
        return (10, 0)
    if "5090" in name:
        return (12, 0)
    if "H100" in name or "H200" in name:
        return (9, 0)
    if "A100" in name:
        return (8, 0)
    return (8, 6) if "A10" in name else (8, 9)


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The user's folder of tables, empty."""
    monkeypatch.setenv("KPT_TUNING", str(tmp_path))
    yield tmp_path
    monkeypatch.undo()
    kpt_core.refresh()


@pytest.fixture
def entries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[TuningEntry]:
    """What ships for the device, which torch now says is here."""
    simulate(monkeypatch, FakeDevice(name=request.param, capability=capability_of(request.param)))
    kpt_core.refresh()
    found, malformed = read_table(FOLDER / table_name(request.param), request.param)
    assert malformed == []
    return found


def config_of(op: str, dtype: str, key: tuple[int | str, ...]) -> dict[str, str] | None:
    """What dispatch has for such calls."""
    tuned = kpt_core.get_op(op).candidates(CUDA, getattr(torch, dtype)).tuned
    entry = None if tuned is None else tuned.entries.get(key)
    return None if entry is None else entry.config


@pytest.mark.parametrize("entries", NAMES, indirect=True)
def test_every_entry_is_what_dispatch_uses_on_that_device(entries: list[TuningEntry]) -> None:
    assert entries
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an entry that is outdated or unknown would be told
        for entry in entries:
            found = kpt_core.get_op(entry.op).candidates(CUDA, getattr(torch, entry.dtype))
            assert found.accepted[0].identity == entry.kernel
            assert config_of(*entry.calls) == entry.config


@pytest.mark.parametrize("entries", NAMES, indirect=True)
def test_every_tile_is_a_candidate_of_that_chip(entries: list[TuningEntry]) -> None:
    """Only those are compiled and read by the matrix."""
    chip = chip_name(torch.cuda.get_device_capability(0))
    for entry in entries:
        for name, written in (entry.config or {}).items():
            product = "wgrad" if entry.op == "moe.grouped_mm_wgrad" else PRODUCTS[name]
            assert Tile.parse(written) in candidate_tiles(product, chip)


@pytest.mark.parametrize("entries", ["NVIDIA H200"], indirect=True)
def test_the_tile_reaches_the_kernel_by_the_sizes_of_the_call(entries: list[TuningEntry]) -> None:
    """Fake tensors stand for those on the device; nothing but sizes is read of them."""

    class OnCuda(torch.Tensor):
        device = CUDA  # type: ignore[assignment]

    def fake(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta").as_subclass(OnCuda)

    entry = next(e for e in entries if e.op == "moe.experts" and e.key[-1] == "plain")
    tokens, top_k, experts, hidden, width, _ = entry.key

    op = kpt_core.get_op("moe.experts")

    def found(tokens: int) -> object:
        routing = fake(tokens, top_k, dtype=torch.int64), fake(tokens, top_k)
        matrices = fake(experts, width, hidden), fake(experts, hidden, width // 2)
        call = op.bind(fake(tokens, hidden), *routing, *matrices)
        _, chosen, _ = choose(op, call, op.candidates(CUDA, torch.bfloat16))
        return None if chosen is None else chosen.config

    assert isinstance(tokens, int)
    assert found(tokens) == found(tokens // 2 + 1) == entry.config
    assert found(100 * tokens) is None


@pytest.mark.parametrize("entries", ["NVIDIA GeForce RTX 5090"], indirect=True)
def test_what_the_user_measured_wins(entries: list[TuningEntry], user: Path) -> None:
    entry = entries[0]
    others = [other for other in entries if other.key[:4] != entry.key[:4]]
    raw = {**asdict(entry), "config": dict.fromkeys(entry.config or {}, ""), "method": "measured"}
    name = torch.cuda.get_device_name(0)
    (user / table_name(name)).write_text(json.dumps({"format": 1, "device": name, "entries": [raw]}))
    kpt_core.refresh()
    assert config_of(*entry.calls) == raw["config"] != entry.config
    assert others
    assert [config_of(*other.calls) for other in others] == [other.config for other in others]


def test_a_device_without_a_table_has_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, FakeDevice(name="NVIDIA GeForce RTX 3070", capability=(8, 6)))
    kpt_core.refresh()
    for kernel in BACKEND.kernels():
        assert kpt_core.get_op(kernel.op).candidates(CUDA, torch.bfloat16).tuned is None
