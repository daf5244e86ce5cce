"""Faults planted in the kernels of `attention.dense`, each of which the cases of their tests must find."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_dense import _CHANGES, _MASKS, _bits, arguments, check, check_unseen
from test_dense_backward import check as check_gradients
from test_dense_backward import check_unseen as check_gradients_unseen

import kpt_triton.attention.backward as real_gradients
import kpt_triton.attention.dense as real
from kpt_triton.numeric import INTERPRETED

#: What a fault is, the file, what is there and what is put in its place.
FAULTS = {
    "the schedule drops the last full tile": ("mask", "counts + place * 2, fulls)", "counts + place * 2, fulls - 1)"),
    "causality is off by one tile": ("mask", "(begin <= last)", "(begin + KEYS <= last)"),
    "a tile of the diagonal is full": ("mask", "(end - 1 <= top + position)", "(end - 1 <= last)"),
    "intervals that end at a tile's first key": ("mask", "(high > begin[None, :])", "(high > begin[None, :] + 1)"),
    "empty intervals are seen": ("mask", "~_ones(begin - first)", "~_ones(begin - first - 1)"),
    "one interval of two": ("mask", "some |= _ones", "some = _ones"),
    "blocks of none are full": ("mask", "tl.where(entry == 0, 0, 1)", "tl.where(entry == 0, 2, 1)"),
    "words of 64 keys lose the last one": ("mask", "tl.where(count == 64,", "tl.where(count == 65,"),
    "the second word of a row is the first": ("mask", "first % 128 // 64)", "0)"),
    "bits of the block before": ("mask", "entry - 2, 0)", "entry - 3, 0)"),
    "bits of another row": ("mask", "* 128 + row % 128)", "* 128 + (row + 1) % 128)"),
    "position is left out of words": ("mask", "_ones(row + position + 1 - first)", "_ones(row + 1 - first)"),
    "position is left out of causality": ("mask", "key[None, :] <= (row + position)", "key[None, :] <= (row)"),
    "the first row of blocks": ("dense", "(line * ROWS // 128)", "(line * 0)"),
    "heads share the first plan": ("dense", "stride_ib + head * stride_ih", "stride_ib"),
    "sequences share the first lists": ("dense", "place = batch * stride_lb + head", "place = head"),
    "heads of keys in another order": ("dense", "(head // groups) * stride_kh", "(head % groups) * stride_kh"),
    "sums of two tiles do not fade": ("scores", "total = total * fading + tl.sum", "total = total + tl.sum"),
    "what was added does not fade": ("scores", "acc * fading[:, None]", "acc"),
    "rows that see nothing are not zero": ("scores", "base = tl.maximum(higher, LOWEST)", "base = higher"),
    "a sink is not in units of log 2": ("dense", "tl.maximum(top, sink)", "tl.maximum(top, sink * LN2)"),
    "a bias is not in units of log 2": ("scores", "other=0.0).to(tl.float32) * LOG2E", "other=0.0).to(tl.float32)"),
    "slopes rise with distance": ("scores", "scores -= slope *", "scores += slope *"),
    "the cap comes after what is added": ("scores", "scores = scores * cap", "scores = scores"),
    "the log-sum-exp is in units of log 2": ("dense", "tl.log2(total)) * LN2", "tl.log2(total))"),
    "values that nobody sees are read": ("scores", "at_v, mask=some[", "at_v, mask=(key < keys)["),
}  # fmt: skip
#: The same of the gradients' kernels.
FAULTS_OF_GRADIENTS = {
    "the last queries are a full tile": ("mask", "(top + ROWS > queries, 1, 2)", "(top > queries, 1, 2)"),
    "turned words of another key": ("mask", "shift = shift[:, None]", "shift = 63 - shift[:, None]"),
    "the second word of a turned row is the first": ("mask", "[:, None], word, high)", "[:, None], word, word)"),
    "causality turned is off by one": ("mask", "key[:, None] <= (row", "key[:, None] < (row"),
    "queries of the diagonal": ("backward", "start - position, 0) // ROWS", "start - position, 0) // ROWS + 1"),
    "the last queries are left out": ("backward", "near - begin + lines - far", "near - begin + 0 * far"),
    "one head of a group": ("backward", "head = kv_head * groups + group", "head = kv_head * groups"),
    "sequences share rows": ("backward", "(batch * tl.num_programs(1) * groups + head)", "(head)"),
    "queries are not scaled": ("backward", "narrow(acc * factor", "narrow(acc"),
    "keys are not scaled": ("backward", "narrow(acc_k * factor", "narrow(acc_k"),
    "the log-sum-exp's gradient is added": ("backward", "found -= tl.load(at", "found += tl.load(at"),
    "what scores lose is left out": ("backward", " - less[None, :]", ""),
    "what queries' scores lose is left out": ("backward", " - less[:, None]", ""),
    "the cap's slope is left out": ("scores", "steep = 1.0 - scores * scores", "steep = 1.0"),
    "rows that see nothing are alive": ("backward", "alive = inside & (top != LOWEST)", "alive = inside"),
    "what dead rows hold is read": ("backward", 'alive = of_row != float("inf")  #', "alive = of_row == of_row  #"),
    "keys that nobody sees are read": ("backward", "some = tl.max(seen.to(tl.int32), 0) > 0", "some = key < keys"),
    "hidden keys have weights": ("backward", "weights = tl.where(seen, weights, 0.0)", "weights = weights"),
    "the largest score is in units of log 2": ("dense", "LOWEST, top * LN2)", "LOWEST, top)"),
    "the sinks' gradient has no sign": ("backward", "-(weights * lost)", "(weights * lost)"),
    "the first row of blocks, turned": ("backward", "table += (first // 128)", "table += (first * 0)"),
    "slopes of another head": ("backward", "slope = tl.load(slopes + head)", "slope = tl.load(slopes + 3 - head)"),
}  # fmt: skip


def planted(folder: Path, file: str, old: str, new: str) -> ModuleType:
    """Return the forward's module with a fault in it or beside it."""
    package = f"faulty_{abs(hash((file, old)))}"
    (folder / package).mkdir()
    (folder / package / "__init__.py").touch()
    for name in ("mask", "scores", "backward", "few", "dense"):
        text = (Path(real.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
        if name == file:
            assert text.count(old) >= 1, f"{old!r} is not in {name}.py"
            text = text.replace(old, new)
        (folder / package / f"{name}.py").write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(
        package, folder / package / "__init__.py", submodule_search_locations=[str(folder / package)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{package}.dense")


def _of_sequences(queries: int, keys: int) -> dict[str, Any]:
    """Return intervals of which the first one's last key is a tile's first, and the second one's are others."""
    ends = torch.tensor([[0, 65], [100, keys]])
    return {"causal": True, "position": 99, "intervals": ends[:, None, None, None].expand(-1, 1, queries, 1, -1).int()}


_OWN = {
    "intervals of sequences": _of_sequences,
    "causal, and an interval of all": lambda q, k: {
        "causal": True, "intervals": torch.tensor([0, k]).expand(1, 1, q, 1, 2).int()
    },
    "bits of one block": lambda q, k: _bits((torch.rand(1, 1, q, k) < 0.5) & (torch.arange(k) < 101)),
}  # fmt: skip
#: Calls that find them: a mask, what changes scores, and a tile.
_CALLS = (
    ("bits, intervals and causality", "nothing", (32, 64)),
    ("bits of one block", "a bias of keys, softcap and sinks", (32, 64)),
    ("intervals of sequences", "sinks", (32, 64)),
    ("two intervals for each sequence and head", "nothing", (64, 128)),
    ("causal, and an interval of all", "slopes", (32, 64)),
    ("an interval of all, and rows of none", "nothing", (32, 64)),
    ("causal before the first key", "softcap", (32, 64)),
    ("bits of heads, with blocks of all and of none", "a bias", (32, 64)),
)


def found(kernel: ModuleType, device: torch.device) -> bool:
    """Tell whether one of the calls shows a fault."""
    torch.manual_seed(0)
    try:
        check_unseen("bits of the first keys", device, kernel)
        for mask, changes, tile in _CALLS:
            hidden = (_MASKS | _OWN)[mask](140, 200)
            check(arguments() | hidden | _CHANGES[changes](140, 200), device, tile, kernel=kernel)
    except AssertionError:
        return True
    return False


@pytest.mark.skipif(not INTERPRETED.value, reason="a fault may read what is not there")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, device: torch.device, tmp_path: Path) -> None:
    assert found(planted(tmp_path, *FAULTS[fault]), device)


def test_without_a_fault_nothing_is_found(device: torch.device) -> None:
    assert not found(real, device)


#: Calls that find faults of the gradients: a mask, what changes scores, and tiles of keys and of queries.
_CALLS_OF_GRADIENTS = (
    ("causal", "slopes", ((32, 64), (64, 32))),
    ("bits of heads, with blocks of all and of none", "sinks", ((32, 64), (64, 32))),
    ("two intervals for each sequence and head", "softcap", ((64, 128), (32, 64))),
    ("an interval of all, and rows of none", "a bias of keys, softcap and sinks", ((32, 64), (64, 32))),
    ("bits, intervals and causality", "nothing", ((16, 32), (64, 128))),
)


def found_in_gradients(kernel: ModuleType, gradients: ModuleType, device: torch.device) -> bool:
    """Tell whether one of the calls shows a fault."""
    torch.manual_seed(0)
    try:
        check_gradients_unseen(device, kernel=kernel, gradients=gradients)
        for mask, changes, tiles in _CALLS_OF_GRADIENTS:
            given = arguments() | _MASKS[mask](140, 200) | _CHANGES[changes](140, 200)
            check_gradients(given, device, tiles, kernel=kernel, gradients=gradients)
    except AssertionError:
        return True
    return False


@pytest.mark.skipif(not INTERPRETED.value, reason="a fault may read what is not there")
@pytest.mark.parametrize("fault", FAULTS_OF_GRADIENTS)
def test_a_planted_fault_of_the_gradients_is_found(fault: str, device: torch.device, tmp_path: Path) -> None:
    kernel = planted(tmp_path, *FAULTS_OF_GRADIENTS[fault])
    assert found_in_gradients(kernel, importlib.import_module(f"{kernel.__package__}.backward"), device)


def test_without_a_fault_nothing_is_found_in_gradients(device: torch.device) -> None:
    assert not found_in_gradients(real, real_gradients, device)
