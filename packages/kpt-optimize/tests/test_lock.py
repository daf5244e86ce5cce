"""Lock files: written from a run, and every way in which reality may differ from them is said."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, InputError, discovery, registry
from kpt_optimize.lock import Lock, LockEntry, read_lock, write_lock
from kpt_optimize.tuning.files import merge_into
from kpt_optimize.tuning.tables import table_name
from loopback import Loopback, kernel, scale, shifted
from plugins import GOOD, entry_points_in, install
from test_tuning_files import DEVICE, ENTRY
from tuning_kernels import named, offer, product, two

Add = Callable[[Backend], Backend]
Setting = Callable[[str, str], None]
FIRST, SECOND = (f"loop/sample.scale/loopback:{name}" for name in ("first", "second"))
PARTS = "loop/sample.shifted/loopback:parts"
COMPOSED = kernel("parts", "sample.shifted", composed_of=("sample.scale",))
X, WEIGHT = torch.randn(4, 5), torch.randn(5, 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kpt.lock"


@pytest.fixture
def lock(path: Path) -> Callable[..., Lock]:
    """Run, write down what ran, and read it again."""

    def run(call: Callable[[], object]) -> Lock:
        with kpt_core.record() as log:
            call()
        written = write_lock(path, log)
        assert read_lock(path) == written
        return written

    return run


def changed(lock: Lock, **fields: Any) -> Lock:
    (entry,) = lock.entries
    return replace(lock, entries=(replace(entry, **fields),))


def test_every_call_of_a_run_is_locked_once_nested_ones_too(add: Add, x: Tensor, lock: Callable[..., Lock]) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows"), COMPOSED))

    def run() -> None:
        for _ in range(3):
            shifted(x)
            scale(torch.ones(9, dtype=torch.bfloat16), torch.ones(9))
            product(X.clone().requires_grad_(), WEIGHT)

    found = [(e.op, e.dtype, e.key, e.kernel, e.refused) for e in lock(run).entries]
    assert found == [
        ("sample.scale", "bfloat16", (), "reference", (FIRST,)),
        ("sample.scale", "float32", (), FIRST, ()),
        ("sample.shifted", "float32", (), PARTS, ()),
        ("tuning.product", "float32", (4, 3, "gradient"), "reference", ()),
    ]


def test_explained_selections_can_be_locked_as_well(
    add: Add, list_torch: Callable[..., None], x: Tensor, path: Path
) -> None:
    list_torch(COMPOSED)
    add(Loopback(kernel("first")))
    locked = write_lock(path, [kpt_core.explain(shifted, x)])
    assert [entry.kernel for entry in locked.entries] == [FIRST, "torch/sample.shifted/loopback:parts"]


def test_the_file_says_what_it_is(add: Add, x: Tensor, lock: Callable[..., Lock], path: Path) -> None:
    add(Loopback(kernel("first")))
    lock(lambda: scale(x, x))
    document = json.loads(path.read_text())
    assert document["format"] == 1
    assert document["versions"] == {"torch": torch.__version__, "kpt-core": kpt_core.__version__}
    (entry,) = document["entries"]
    assert entry == {
        "op": "sample.scale",
        "device_type": "cpu",
        "device": DEVICE,
        "dtype": "float32",
        "key": [],
        "kernel": FIRST,
        "distribution": None,
        "version": None,
        "tuned": False,
        "config": None,
        "refused": [],
    }
    again = path.read_bytes()
    lock(lambda: scale(x, x))
    assert path.read_bytes() == again  # nothing in it changes by itself: it can be under version control


def test_reality_as_it_was(add: Add, x: Tensor, lock: Callable[..., Lock]) -> None:
    """Also where a kernel that comes first refused the arguments."""
    add(Loopback(kernel("first", unsupported="at_most_four_rows", priority=1), kernel("second")))
    locked = lock(lambda: (scale(x, x), scale(torch.ones(9), torch.ones(9)), shifted(torch.ones(7))))
    kpt_core.refresh()
    assert {entry.kernel for entry in locked.entries} == {FIRST, SECOND, "reference"}
    assert locked.differences() == []


def test_a_kernel_that_is_refused_now(add: Add, x: Tensor, lock: Callable[..., Lock], setting: Setting) -> None:
    add(Loopback(kernel("first", priority=1), kernel("second")))
    locked = lock(lambda: scale(x, x))
    setting("KPT_DISABLE", "loopback:first")
    assert locked.differences() == [
        f"sample.scale on {DEVICE}, float32: {FIRST} was locked, {SECOND} would run now because "
        "the locked one is refused: disabled (KPT_DISABLE)"
    ]
    setting("KPT_DISABLE", "loop")
    (said,) = locked.differences()
    assert "reference would run now because the locked one is refused: disabled" in said
    setting("KPT_USE", "reference")
    (said,) = locked.differences()
    assert "reference was asked for" in said


def test_a_kernel_that_is_gone_or_new(add: Add, x: Tensor, lock: Callable[..., Lock]) -> None:
    add(Loopback(kernel("first")))
    locked = lock(lambda: scale(x, x))
    add(Loopback(kernel("second", priority=5), name="other"))
    (said,) = locked.differences()
    other = "other/sample.scale/loopback:second"
    assert f"{FIRST} was locked, {other} would run now because it comes first now" in said
    registry.remove_backend("other")
    registry.remove_backend("loop")
    (said,) = locked.differences()
    assert "no installed backend offers it" in said


def test_a_kernel_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path, x: Tensor) -> None:
    install(tmp_path, "locked_plugin", GOOD)
    info = tmp_path / "dist_of_locked_plugin-1.0.dist-info" / "entry_points.txt"
    info.write_text("[kpt.backends]\nlocked_plugin = locked_plugin:BACKEND\n[kpt.ops]\nlocked = locked_plugin:OPS\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(discovery, "entry_points", lambda group: entry_points_in(tmp_path, group))
    monkeypatch.setattr(registry, "_ops", dict(registry._ops))
    kpt_core.refresh()
    write_lock(path, [kpt_core.explain("plugin.double", x)])
    locked = read_lock(path)
    assert (locked.entries[0].distribution, locked.entries[0].version) == ("dist-of-locked_plugin", "1.0")
    assert locked.differences() == []
    older = changed(locked, version="0.9")
    sys.modules.pop("locked_plugin")
    assert older.differences() == [
        "kernel locked_plugin/plugin.double/locked_plugin:kernel of dist-of-locked_plugin 0.9 was locked for "
        "plugin.double, 1.0 is installed"
    ]


def test_tuning_that_differs(add: Add, setting: Setting, tmp_path: Path, lock: Callable[..., Lock]) -> None:
    add(Loopback(*two().offered, offer("tiled", priority=20)))
    setting("KPT_TUNING", str(tmp_path))
    table = tmp_path / table_name(DEVICE)
    tiled = replace(ENTRY, kernel=named("tiled"), config={"rows": 32})
    merge_into(table, DEVICE, [tiled])
    kpt_core.refresh()
    locked = lock(lambda: product(X, WEIGHT))
    assert locked.entries[0].config == {"rows": 32}
    assert locked.differences() == []
    merge_into(table, DEVICE, [replace(tiled, config={"rows": 8})])
    kpt_core.refresh()
    calls = f"tuning.product on {DEVICE}, float32, sizes 4, 3"
    assert locked.differences() == [
        f'{calls}: tuning differs: configuration {{"rows": 32}} was locked for {named("tiled")}, '
        'configuration {"rows": 8} is in force'
    ]
    setting("KPT_TUNING", "0")
    (said,) = locked.differences()
    assert said.endswith("its default configuration is in force")
    setting("KPT_TUNING", str(tmp_path))
    for winner in (named("quick"), "reference"):
        merge_into(table, DEVICE, [replace(ENTRY, kernel=winner)])
        kpt_core.refresh()
        (said,) = locked.differences()
        assert f"{winner} would run now because tuning differs: a table of 2026-01-01" in said
    merge_into(table, DEVICE, [replace(ENTRY, kernel=named("quick"))])
    kpt_core.refresh()
    locked = lock(lambda: product(X, WEIGHT))
    setting("KPT_TUNING", "0")
    (said,) = locked.differences()
    assert said.endswith("because tuning differs: a table put the locked one first, and none does now")


def test_another_machine_and_other_versions(add: Add, x: Tensor, lock: Callable[..., Lock]) -> None:
    add(Loopback(kernel("first")))
    locked = lock(lambda: scale(x, x))
    assert changed(locked, device="Abacus (2 threads)").differences() == [
        f"Abacus (2 threads) was locked, this machine has {DEVICE}"
    ]
    (said,) = changed(locked, device="NVIDIA H300", device_type="cuda").differences()
    assert said.startswith("NVIDIA H300 was locked, this machine has ")
    (said,) = changed(locked, op="sample.scael").differences()
    assert said.startswith("sample.scael was locked: unknown op 'sample.scael': did you mean 'sample.scale'")
    (said,) = changed(locked, dtype="float3").differences()
    assert "it can't run now" in said
    assert replace(locked, versions={"torch": "1.0"}).differences() == [
        f"torch 1.0 was locked, {torch.__version__} is installed"
    ]


def test_a_kernel_that_two_backends_offer(add: Add, x: Tensor, lock: Callable[..., Lock]) -> None:
    """It is not the locked one: what it is asked, and how it is tuned, may differ."""
    add(Loopback(kernel("first")))
    locked = lock(lambda: scale(x, x))
    add(Loopback(kernel("first", priority=1), name="other"))
    (said,) = locked.differences()
    assert f"{FIRST} was locked, other/sample.scale/loopback:first would run now because it comes first now" in said


GOOD_ENTRY = asdict(
    LockEntry(
        op="a.b", device_type="cpu", device="d", dtype="float32", key=(), kernel="k:k", distribution=None,
        version=None, tuned=False, config=None, refused=(),
    )
)  # fmt: skip
BAD: dict[str, tuple[object, str]] = {
    "not JSON": ("{", "is no lock file: it is not whole JSON"),
    "other format": ({"format": 9}, "is no lock file: expected format 1, found 9"),
    "a list": ([], "found 'list'"),
    "no versions": ({"format": 1, "entries": []}, "its versions are None"),
    "no entries": ({"format": 1, "versions": {}}, "its entries are None, not a list"),
    "an entry of text": ({"format": 1, "versions": {}, "entries": ["x"]}, "an entry is 'x'"),
    "a field less": ({"format": 1, "versions": {}, "entries": [{"op": "a.b"}]}, "an entry lacks or adds config"),
    **{
        f"wrong {name}": (
            {"format": 1, "versions": {}, "entries": [GOOD_ENTRY | {name: value}]},
            f"an entry's {name} is",
        )
        for name, value in (("key", [1.5]), ("refused", "k"), ("config", [1]), ("op", ""), ("version", 2), ("tuned", 1))
    },
}


@pytest.mark.parametrize(("content", "said"), BAD.values(), ids=BAD)
def test_a_file_that_is_no_lock_file(path: Path, content: object, said: str) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError, match=said) as raised:
        read_lock(path)
    assert str(path) in str(raised.value)
    assert "`kpt lock` writes one" in str(raised.value)


def test_a_file_that_is_missing(path: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no lock file at .*kpt\.lock: `kpt lock --output .*kpt\.lock` writes one"):
        read_lock(path)
    with pytest.raises(InputError, match="can't be read"):
        read_lock(tmp_path)
