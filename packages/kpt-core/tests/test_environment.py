"""KPT_USE, KPT_DISABLE and KPT_STRICT say the same as `use`, for a whole process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import kpt_core
from kpt_core import Backend, InputError, NoKernelError, UnknownNameError
from loopback import Fault, Loopback, hundreds, kernel, mixed, scale, shifted

Add = Callable[[Backend], Backend]
Setting = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def two_backends(add: Add) -> None:
    add(Loopback(kernel("first", priority=3), kernel("second", priority=2), name="near"))
    add(Loopback(kernel("third"), kernel("whole", "sample.shifted"), name="far"))


@pytest.mark.parametrize(
    ("value", "scaled", "composed"),
    [
        ("", 1, 4),
        ("reference", 0, 0),
        ("far", 3, 4),
        ("loopback:second", 2, 4),
        ("sample.shifted=reference", 1, 0),
        (" sample.scale = reference , ", 0, 4),
        ("reference,sample.scale=near", 1, 0),
        ("sample.scale=near,reference", 1, 0),
        ("sample.shifted=reference,sample.scale=loopback:third", 3, 0),
        ("far/sample.scale/loopback:third", 3, 4),
    ],
)
def test_use(setting: Setting, x: Tensor, value: str, scaled: int, composed: int) -> None:
    setting("KPT_USE", value)
    assert [hundreds(scale(x, x)), hundreds(scale(x, x)), hundreds(shifted(x))] == [scaled, scaled, composed]


def test_use_is_strict(setting: Setting, x: Tensor) -> None:
    setting("KPT_USE", "near")
    with pytest.raises(NoKernelError, match=r"no kernel for sample.mixed on cpu: near was asked for"):
        mixed(x, x, x)


def test_a_block_overrides_the_environment(setting: Setting, x: Tensor) -> None:
    setting("KPT_USE", "far")
    with kpt_core.use("near"):
        assert hundreds(scale(x, x)) == 1
    assert hundreds(scale(x, x)) == 3


@pytest.mark.parametrize(
    ("value", "offer"),
    [
        ("nera", "backend or kernel 'nera': did you mean 'near'"),
        ("sample.scale=nera", "backend or kernel 'nera': did you mean 'near'"),
        ("sample.scael=near", "op 'sample.scael': did you mean 'sample.scale'"),
    ],
)
def test_use_of_an_unknown_name_offers_the_nearest(setting: Setting, x: Tensor, value: str, offer: str) -> None:
    setting("KPT_USE", value)
    with pytest.raises(UnknownNameError, match=f"unknown {offer}"):
        scale(x, x)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("near,reference", "all ops"),
        ("near,near", "all ops"),
        ("sample.scale=near,far,sample.scale=far", "sample.scale"),
    ],
)
def test_two_answers_to_one_question_are_an_error(setting: Setting, x: Tensor, value: str, what: str) -> None:
    setting("KPT_USE", value)
    with pytest.raises(InputError, match=f"KPT_USE='{value}': it asks for two things for {what}; name one"):
        scale(x, x)


@pytest.mark.parametrize("value", ["=near", "sample.scale=", "near,=", "="])
def test_a_malformed_use_is_an_error_that_shows_it(setting: Setting, x: Tensor, value: str) -> None:
    setting("KPT_USE", value)
    with pytest.raises(InputError, match=f"KPT_USE='{value}': '.*' is not of the form 'name' or 'op=name'"):
        scale(x, x)


@pytest.mark.parametrize(
    ("value", "served"),
    [("near", 3), ("loopback:first", 2), ("loopback:first, near, far", 0), ("", 1)],
)
def test_disable(setting: Setting, x: Tensor, value: str, served: int) -> None:
    setting("KPT_DISABLE", value)
    assert hundreds(scale(x, x)) == served


def test_disable_warns_once_of_a_name_that_nothing_has(setting: Setting, x: Tensor) -> None:
    setting("KPT_DISABLE", "nera,loopback:first")
    with pytest.warns(kpt_core.KptWarning) as warned:
        assert [hundreds(t) for t in (scale(x, x), scale(x.double(), x), shifted(x))] == [2, 2, 4]
    assert [str(w.message) for w in warned] == [
        "unknown backend or kernel 'nera': did you mean 'near'? (in KPT_DISABLE, where it has no effect)"
    ]
    assert [w.filename for w in warned] == [__file__]


def test_disable_tells_so_and_beats_use(setting: Setting, x: Tensor) -> None:
    setting("KPT_DISABLE", "near/sample.scale/loopback:first,loopback:second")
    with kpt_core.use("near"), pytest.raises(NoKernelError, match=r"loopback:first\): disabled \(KPT_DISABLE\)"):
        scale(x, x)


@pytest.mark.parametrize("value", ["1", "true", " TRUE "])
def test_strict(setting: Setting, add: Add, x: Tensor, value: str) -> None:
    setting("KPT_STRICT", value)
    add(Loopback(kernel("faulty", priority=9)))
    Fault.error = RuntimeError("no launch")
    with pytest.raises(RuntimeError, match="no launch"):
        scale(x, x)


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_not_strict(setting: Setting, add: Add, x: Tensor, value: str) -> None:
    setting("KPT_STRICT", value)
    add(Loopback(kernel("faulty", priority=9)))
    Fault.error = RuntimeError("no launch")
    with pytest.warns(kpt_core.KernelFailedWarning):
        assert hundreds(scale(x, x)) == 1


def test_a_malformed_strict_is_an_error_that_shows_it(setting: Setting, x: Tensor) -> None:
    setting("KPT_STRICT", "yes")
    with pytest.raises(InputError, match="KPT_STRICT='yes': expected 0 or 1"):
        scale(x, x)


def test_the_environment_is_read_once_until_refresh(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    scale(x, x)
    monkeypatch.setenv("KPT_USE", "reference")
    assert hundreds(scale(x, x)) == 1
    assert hundreds(scale(x.double(), x)) == 1
    kpt_core.refresh()
    assert hundreds(scale(x, x)) == 0


def test_compiled_code_obeys(setting: Setting, x: Tensor) -> None:
    count = CompileCounter()
    compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend=count)
    assert hundreds(compiled(x)) == 1
    for value, served in (("far", 3), ("", 1), ("reference", 0)):
        setting("KPT_USE", value)
        assert hundreds(compiled(x)) == served
    assert count.frame_count == 1
