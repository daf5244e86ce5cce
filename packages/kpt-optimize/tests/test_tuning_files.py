"""Tuning tables as files: whatever lies there never stops a call, is told once, and is not overwritten in silence."""

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import kpt_core
import tuning_kernels
from kpt_core import Backend, Kernel, registry
from kpt_optimize.tuning import TuningEntry, TuningWarning, device_name
from kpt_optimize.tuning.files import merge_into, packages_of, read_table
from kpt_optimize.tuning.tables import table_name
from loopback import Loopback
from tuning_kernels import named, product, two

Add = Callable[[Backend], Backend]
Setting = Callable[[str, str], None]
X, WEIGHT = torch.randn(4, 5), torch.randn(5, 3)
ENTRY = TuningEntry(
    op="tuning.product",
    dtype="float32",
    key=(4, 3),
    kernel=named("quick"),
    config=None,
    seconds=1e-3,
    default=named("slow"),
    present=(named("tiled"), named("slow"), named("quick")),
    gain=4.0,
    noise=0.01,
    case="few",
    distribution=None,
    version=None,
    torch="2.13.0",
    date="2026-01-01T00:00:00Z",
)
DEVICE = device_name("cpu")


@pytest.fixture(autouse=True)
def table(add: Add, setting: Setting, tmp_path: Path) -> Path:
    add(two())
    setting("KPT_TUNING", str(tmp_path))
    return tmp_path / table_name(DEVICE)


def write(table: Path, *entries: Any, **header: Any) -> None:
    raw = [asdict(entry) if isinstance(entry, TuningEntry) else entry for entry in entries]
    table.write_text(json.dumps({"format": 1, "device": DEVICE, "entries": raw} | header))
    kpt_core.refresh()


def served() -> str:
    return kpt_core.explain(product, X, WEIGHT).kernel.rpartition(":")[2]


def test_a_table_written_by_hand_takes_effect_at_refresh(table: Path) -> None:
    assert served() == "slow"
    write(table, ENTRY)
    assert served() == "quick"
    table.unlink()
    assert served() == "quick"  # until tables are read again
    kpt_core.refresh()
    assert served() == "slow"


BROKEN = {
    "empty": ("", "it is not whole JSON"),
    "truncated": (json.dumps({"format": 1, "device": DEVICE, "entries": []})[:-5], "it is not whole JSON"),
    "not text": (b"\xff\xfe\x00", "it is not whole JSON .*utf-8"),
    "a list": ("[]", "expected format 1, found 'list'"),
    "other format": ('{"format": 2, "entries": []}', "expected format 1, found 2"),
    "no entries": ('{"format": 1, "entries": {}}', "its entries are {}, not a list"),
    "other device": ('{"format": 1, "device": "NVIDIA H200", "entries": []}', "it is for 'NVIDIA H200', not for"),
    "not a number": ('{"format": 1, "seconds": NaN, "entries": []}', "it is not whole JSON .it holds NaN"),
    "nested": ("[" * 100_000, "it is not whole JSON"),
}


@pytest.mark.parametrize(("content", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_or_foreign_file_is_ignored_with_one_sentence_and_kept(
    table: Path, content: str | bytes, reason: str
) -> None:
    table.write_bytes(content if isinstance(content, bytes) else content.encode())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert torch.equal(product(X, WEIGHT), X @ WEIGHT)
        product(X.double(), WEIGHT.double())
        registry.forget_selections()
        product(X, WEIGHT)
    (warning,) = said
    assert warning.category is TuningWarning
    assert re.match(f"tuning table {table}: ignored, because {reason}", str(warning.message))
    assert "\n" not in str(warning.message)
    before = table.read_bytes()
    aside = merge_into(table, DEVICE, [ENTRY])
    assert aside == table.with_name(f"{table.name}.corrupt")
    assert aside.read_bytes() == before
    kpt_core.refresh()
    assert served() == "quick"


def test_what_was_kept_before_is_kept_too(table: Path) -> None:
    for content in ("first", "second"):
        table.write_text(content)
        merge_into(table, DEVICE, [ENTRY])
    assert table.with_name(f"{table.name}.corrupt").read_text() == "first"
    assert table.with_name(f"{table.name}.corrupt2").read_text() == "second"


WRONG = {
    "number as text": ({"seconds": "1e-3"}, "an entry's seconds is '1e-3', not a finite number"),
    "truth as number": ({"gain": True}, "an entry's gain is True"),
    "negative": ({"noise": -1.0}, "an entry's noise is -1.0"),
    "key of floats": ({"key": [4.0, 3]}, r"an entry's key is \[4.0, 3\], not a list of ints and texts"),
    "key as text": ({"key": "4, 3"}, "an entry's key is"),
    "present as text": ({"present": "a:b"}, "an entry's present is 'a:b', not a list of texts"),
    "config as list": ({"config": [1]}, r"an entry's config is \[1\], not an object or null"),
    "no kernel": ({"kernel": ""}, "an entry's kernel is ''"),
    "one field more": ({"call": "os.system"}, "an entry lacks or adds call"),
    "unknown kernel": ({"kernel": "gone:kernel"}, "kernel gone:kernel of tuning.product is offered by no installed"),
    "another backend's": (
        {"kernel": named("quick", backend="other")},
        "kernel other/tuning.product/tuning_kernels:quick of tuning.product is offered by no installed backend",
    ),
    "other version": (
        {"distribution": "fast-kernels", "version": "0.2.0"},
        "was measured as of fast-kernels 0.2.0, and comes from this process now",
    ),
}


@pytest.mark.parametrize(("change", "reason"), WRONG.values(), ids=WRONG)
def test_a_wrong_or_outdated_entry_is_ignored_with_one_sentence_and_the_others_hold(
    table: Path, change: dict[str, Any], reason: str
) -> None:
    write(table, asdict(ENTRY) | {"key": [64, 64]} | change, asdict(ENTRY) | {"key": [8, 8]} | change, ENTRY)
    with pytest.warns(TuningWarning, match=f"^2 of 3 entries of tuning table {table}: ignored, because .*{reason}"):
        assert served() == "quick"


@pytest.mark.parametrize("raw", [None, 3, [], {"op": "tuning.product"}])
def test_an_entry_of_another_kind(table: Path, raw: object) -> None:
    write(table, raw)
    with pytest.warns(TuningWarning, match="1 of 1 entries .* an entry"):
        assert served() == "slow"


def test_entries_of_a_backend_that_is_not_installed_here_survive_a_merge(table: Path) -> None:
    """Two environments may share a user's cache."""
    other = replace(ENTRY, kernel="elsewhere:kernel", key=(64, 3))
    write(table, other)
    assert merge_into(table, DEVICE, [ENTRY]) is None
    entries, malformed = read_table(table, DEVICE)
    assert (sorted(entry.kernel for entry in entries), malformed) == (["elsewhere:kernel", ENTRY.kernel], [])


def test_a_new_result_replaces_the_old_one_for_the_same_calls(table: Path) -> None:
    write(table, ENTRY, replace(ENTRY, dtype="bfloat16"))
    merge_into(table, DEVICE, [replace(ENTRY, gain=5.0)])
    entries, _ = read_table(table, DEVICE)
    assert sorted((entry.dtype, entry.gain) for entry in entries) == [("bfloat16", 4.0), ("float32", 5.0)]


def test_a_file_that_may_not_be_read_or_is_a_folder_is_ignored(table: Path) -> None:
    table.mkdir()
    with pytest.warns(TuningWarning, match="it can't be read"):
        assert served() == "slow"


def test_a_folder_that_is_not_there_is_no_news(setting: Setting, table: Path) -> None:
    table.write_text("{}")
    setting("KPT_TUNING", str(table))  # a file where the folder should be
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert served() == "slow"


def test_names_of_devices_become_names_of_files() -> None:
    assert table_name("NVIDIA H200") == "NVIDIA_H200.json"
    assert table_name("../../etc/passwd") == "etc_passwd.json"
    assert table_name("Intel(R) Xeon(R) @ 2.0GHz (8 threads)") == "Intel_R_Xeon_R_2.0GHz_8_threads.json"
    assert table_name("///") == "device.json"


def test_a_cpu_s_name_has_its_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert device_name("cpu").endswith(" (1 thread)")
        torch.set_num_threads(3)
        assert device_name("cpu").endswith(" (3 threads)")
    finally:
        torch.set_num_threads(before)


#: Tunes one op over and over, for real time; the other process tunes another into the same file.
PROCESS = """
import sys
from dataclasses import replace
from pathlib import Path
from kpt_optimize.tuning.files import TuningEntry, merge_into

table, op = Path(sys.argv[1]), sys.argv[2]
entry = TuningEntry(op=op, dtype="float32", key=(0,), kernel="a:b", config=None, seconds=1.0, default="a:b", present=(),
    gain=1.0, noise=0.0, case="c", distribution=None, version=None, torch="2", date="today")
print("ready", flush=True)
sys.stdin.readline()
for size in range(40):
    merge_into(table, "device", [replace(entry, key=(size,))])
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    table = tmp_path / "new folder" / "device.json"
    names = ["one.op", "two.op", "three.op"]
    running = [
        subprocess.Popen([sys.executable, "-c", PROCESS, table, name], stdin=-1, stdout=-1, text=True) for name in names
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(120) for process in running] == [0, 0, 0]
    for process in running:
        process.communicate()
    entries, malformed = read_table(table, "device")
    assert malformed == []
    assert sorted((entry.op, entry.key) for entry in entries) == sorted(
        (name, (size,)) for name in names for size in range(40)
    )
    assert sorted(path.name for path in table.parent.iterdir()) == [".device.json.lock", "device.json"]


def test_without_file_locks_a_table_is_still_written(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    merge_into(table, DEVICE, [ENTRY])
    assert served() == "quick"


def test_a_failed_write_leaves_the_old_table(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(table, ENTRY)
    before = table.read_text()

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        merge_into(table, DEVICE, [replace(ENTRY, gain=9.0)])
    assert table.read_text() == before


def test_the_module_of_kernels_is_alive() -> None:
    """The entry of these tests names a kernel that is there: else every one would be ignored for another reason."""
    assert ENTRY.kernel.partition(":")[2] in vars(tuning_kernels)
    assert ENTRY.kernel in packages_of("tuning.product")


def test_packages_are_those_of_the_code_and_not_of_the_backend_that_offers_it(add: Add) -> None:
    for name in ("one", "two"):
        add(Loopback(Kernel("tuning.product", "torch.nn.functional:linear"), name=name))
    found = packages_of("tuning.product")
    assert found["reference"] == (None, None)  # a module of these tests
    for name in ("one", "two"):
        assert found[f"{name}/tuning.product/torch.nn.functional:linear"] == ("torch", version("torch"))
