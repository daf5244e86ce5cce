"""Other processes: forked and spawned workers, pickles, copies."""

import copy
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import kpt_core
from kpt_core import Backend, Refusal, registry
from kpt_core.selection import Refused
from kpt_core.shared_config import SwitchWatch, warn_of_switch
from loopback import Loopback, hundreds, kernel, scale, shifted

Add = Callable[[Backend], Backend]
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


class Layer(torch.nn.Module):
    """A module that holds an op."""

    def __init__(self) -> None:
        super().__init__()
        self.op = scale
        self.weight = torch.nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, self.weight)


class Rows(Dataset[Tensor]):
    """Data that an op prepares, in workers."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> Tensor:
        return self.layer(torch.full((4,), float(row))).detach()


def test_an_op_is_pickled_by_name_and_copied_as_itself() -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps([scale, shifted], protocol)) == [scale, shifted]
    assert copy.deepcopy(scale) is scale
    assert copy.copy(scale) is scale
    layer = copy.deepcopy(Layer())
    assert layer.op is scale
    assert len(kpt_core.ops()) == len({id(op) for op in kpt_core.ops().values()})


def test_a_module_that_watches_its_config_is_pickled_without_the_watch() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.config = SimpleNamespace(chosen="kpt")  # type: ignore[assignment]
    warn_of_switch(layer, "chosen", "kpt")
    x, written = torch.randn(3, 2), pickle.dumps(layer)
    assert b"kpt_core" not in written
    again = pickle.loads(written)
    assert torch.equal(again(x), layer(x))
    assert [type(hook) for hook in again._forward_pre_hooks.values()] == [type({}.pop)]
    assert [type(hook) for hook in copy.deepcopy(layer)._forward_pre_hooks.values()] == [SwitchWatch]


def test_a_module_that_holds_an_op_is_saved_and_loaded() -> None:
    file = io.BytesIO()
    torch.save(Layer(), file)
    file.seek(0)
    assert torch.load(file, weights_only=False).op is scale


def test_what_dispatch_tells_is_pickled(add: Add) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows", requires={"x"}), kernel("second")))
    selection = kpt_core.explain(scale, torch.ones(5), torch.ones(5))
    again = pickle.loads(pickle.dumps(selection))
    assert again == selection
    assert str(again) == str(selection)
    assert pickle.loads(pickle.dumps(kernel("first", requires={"x"}))) == kernel("first", requires={"x"})
    assert str(pickle.loads(pickle.dumps(Refused("a", "b", Refusal("{n} rows", n=3))))) == "a (b): 3 rows"


def test_errors_are_pickled_as_pools_of_workers_do(x: Tensor) -> None:
    for call in (lambda: scale(x, None), lambda: kpt_core.get_op("sample.scael")):
        with pytest.raises(kpt_core.KptError) as caught:
            call()
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (type(caught.value), str(caught.value))
        assert vars(again) == vars(caught.value)


@pytest.mark.parametrize("method", [pytest.param("fork", marks=forks), "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_a_data_loader(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPT_USE", "reference")  # spawned, they see what is installed
    loader = DataLoader(Rows(Layer()), batch_size=2, num_workers=1, multiprocessing_context=method)
    assert torch.cat(list(loader))[:, 0].tolist() == [0.0, 3.0, 6.0, 9.0]


#: Defines an op in its main module, and unpickles what another process has pickled.
SCRIPT = """
import pickle, sys
op, layer = pickle.load(open(sys.argv[1], "rb"))
import loopback
assert op is loopback.scale and layer.op is op
print(op.name)
"""


def test_a_fresh_process_imports_what_defines_the_op(tmp_path: Path) -> None:
    with open(tmp_path / "op.pickle", "wb") as file:
        pickle.dump((scale, Layer()), file)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "op.pickle"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "sample.scale\n", done.stderr


def in_a_fork(work: Callable[[], Any]) -> Any:
    """What a forked child finds, which must not take long."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(False)
    child = context.Process(target=lambda: sender.send(work()))
    child.start()
    try:
        assert receiver.poll(60), "the child hangs"
        return receiver.recv()
    finally:
        child.kill()
        child.join()


@forks
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("warm", [False, True])
def test_a_fork_while_another_thread_holds_the_lock(add: Add, x: Tensor, warm: bool) -> None:
    """Its child has the lock, and no thread that would give it back."""
    add(Loopback(kernel("first"), kernel("second")))
    if warm:
        scale(x, x)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with registry._lock:
            held.set()
            done.wait(120)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)

    def work() -> list[int]:
        torch.set_num_threads(1)
        seen = [hundreds(scale(x, x))]
        kpt_core.refresh()
        registry.add_backend(Loopback(kernel("third", priority=9), name="of_the_child"))
        with kpt_core.use("loopback:second"):
            seen.append(hundreds(scale(x, x)))
        return [*seen, hundreds(scale(x, x)), len(kpt_core.ops()) > 0]

    try:
        assert in_a_fork(work) == [1, 2, 3, True]
    finally:
        done.set()
        holder.join()
    assert hundreds(scale(x, x)) == 1  # nothing of the child's is here


@forks
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_inside_a_block_is_inside_it(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", priority=1), kernel("second")))
    with kpt_core.use("loopback:second"):
        assert in_a_fork(lambda: hundreds(scale(x, x))) == 2
