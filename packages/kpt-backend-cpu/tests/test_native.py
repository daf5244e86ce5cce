"""Which library is loaded, what is said where none can be, and that threads and processes don't disturb each other."""

import copy
import ctypes
import os
import pickle
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from kpt_backend_cpu import BACKEND, KPT_CPU_ISA, native
from kpt_backend_cpu.linear import few_rows
from kpt_core import InputError, get_op
from kpt_optimize.few_rows import FewRowsLinear
from kpt_optimize.linear import linear


def of_this_machine() -> tuple[str, ...]:
    """What can be loaded here; a placeholder without a library, so that its tests are skipped and not lost."""
    return native.library().there if BACKEND.unavailable() is None else ("baseline",)


@pytest.fixture
def unloaded(monkeypatch):
    """The library is loaded anew by what follows, and as it was before afterwards."""
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.delenv(KPT_CPU_ISA, raising=False)


def is_right(kernels, rows: int = 40, threads: int | None = None) -> bool:
    """Whether `grouped_mm` gives what it has to, on so many threads."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 37, generator=generator), torch.randn(3, 37, 21, generator=generator)
    ends = [rows // 4, rows // 4, rows]
    want = torch.cat([x[a:b].double() @ w.double() for w, a, b in zip(weight, [0, *ends], ends, strict=False)])
    offsets, before = torch.tensor(ends, dtype=torch.int32), torch.get_num_threads()
    torch.set_num_threads(threads or before)
    got = kernels["grouped_mm"](x, weight, offsets)
    torch.set_num_threads(before)
    return torch.allclose(got.double(), want, rtol=1e-5, atol=1e-4)


def test_the_best_library_is_loaded(unloaded, kernels):
    found = native.library()
    assert found.instruction_set == found.there[0]
    assert found.there[-1] == "baseline"
    assert type(found.functions) is ctypes.CDLL  # which lets other Python threads run meanwhile


@pytest.mark.parametrize("name", of_this_machine())
def test_an_instruction_set_can_be_forced_and_computes_right(name, kernels, unloaded, monkeypatch):
    monkeypatch.setenv(KPT_CPU_ISA, name)
    assert native.library().instruction_set == name
    told = BACKEND.capabilities(torch.device("cpu"))
    better = native.INSTRUCTION_SETS[: native.INSTRUCTION_SETS.index(name)]
    assert name in told
    assert told.isdisjoint(better), "what is above the forced one is hidden"
    assert is_right(kernels)


@pytest.mark.parametrize("value", ["avx", "AVX2", "avx512_bf16x"])
def test_an_unknown_instruction_set_is_refused_naming_those_that_are_there(value, kernels, unloaded, monkeypatch):
    monkeypatch.setenv(KPT_CPU_ISA, value)
    with pytest.raises(InputError, match=f"KPT_CPU_ISA .* one of .*baseline; got '{value}'"):
        BACKEND.unavailable()
    monkeypatch.delenv(KPT_CPU_ISA)
    assert BACKEND.unavailable() is None, "and nothing is remembered of it"


def test_an_instruction_set_without_a_library_is_refused(kernels, unloaded, monkeypatch, tmp_path):
    shutil.copy(native.LIBRARIES / "kpt_cpu_baseline.so", tmp_path)
    monkeypatch.setattr(native, "LIBRARIES", tmp_path)
    monkeypatch.setenv(KPT_CPU_ISA, "avx2")
    with pytest.raises(InputError, match="one of baseline; got 'avx2'"):
        native.library()
    monkeypatch.delenv(KPT_CPU_ISA)
    assert native.library().there == ("baseline",)
    assert is_right(kernels)


def test_a_machine_is_offered_only_what_it_runs(kernels, unloaded, monkeypatch):
    """The machine is simulated: the library says that it has AVX2 alone."""
    baseline = native.library_path("baseline")

    def simulated(name):
        functions = ctypes.CDLL(str(baseline))
        functions.kpt_cpu_instruction_sets = lambda: b"avx2 baseline"
        return functions

    monkeypatch.setattr(native, "_open", simulated)
    monkeypatch.setattr(native, "library_path", lambda name: baseline)
    assert native.library().there == ("avx2", "baseline")
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setenv(KPT_CPU_ISA, "avx512")
    with pytest.raises(InputError, match="avx2, baseline; got 'avx512'"):
        native.library()


def test_without_libraries_the_reason_of_the_build_is_told(unloaded, monkeypatch, tmp_path):
    (tmp_path / "missing.txt").write_text(
        "no C++ compiler was found: install one, then install kpt-backend-cpu again\n"
    )
    monkeypatch.setattr(native, "LIBRARIES", tmp_path)
    assert BACKEND.unavailable() == (
        "it has no native libraries: no C++ compiler was found: install one, then install kpt-backend-cpu again"
    )
    assert BACKEND.capabilities(torch.device("cpu")) == frozenset()


def test_without_a_build_the_remedy_is_told(unloaded, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "LIBRARIES", tmp_path)
    reason = BACKEND.unavailable()
    assert reason is not None
    assert str(tmp_path) in reason
    assert "install kpt-backend-cpu" in reason


def test_a_library_of_another_interface_is_not_used(kernels, unloaded, monkeypatch):
    monkeypatch.setattr(native, "INTERFACE", 99)
    reason = BACKEND.unavailable()
    assert reason is not None
    assert "this package 99" in reason
    assert "install kpt-backend-cpu again" in reason


def test_a_library_without_one_of_the_kernels_is_not_used(kernels, unloaded, monkeypatch):
    monkeypatch.setattr(native, "KERNELS", {**native.KERNELS, "kpt_of_tomorrow": native.KERNELS["kpt_sort"]})
    assert "lacks kpt_of_tomorrow" in (BACKEND.unavailable() or "")


def test_a_file_that_is_no_library_is_told(unloaded, monkeypatch, tmp_path):
    (tmp_path / "kpt_cpu_baseline.so").write_bytes(b"nothing of the kind")
    monkeypatch.setattr(native, "LIBRARIES", tmp_path)
    reason = BACKEND.unavailable() or ""
    assert "kpt_cpu_baseline.so can't be used" in reason
    assert "install kpt-backend-cpu again" in reason


WITHOUT = """
import sys
from pathlib import Path
import torch
import kpt_backend_cpu.native as native
native.LIBRARIES = Path(sys.argv[1])
import kpt_core.__main__
from kpt_core import ops
logits = torch.randn(5, 4)
weights, index = ops()["moe.top_k_gating"](logits, top_k=2)
assert torch.equal(index, logits.topk(2).indices)
raise SystemExit(kpt_core.__main__.main())
"""


def test_without_libraries_the_references_serve_and_the_core_s_report_names_the_reason(tmp_path):
    (tmp_path / "missing.txt").write_text("the reason of the build\n")
    done = subprocess.run([sys.executable, "-c", WITHOUT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "it has no native libraries: the reason of the build" in done.stdout
    assert "op moe.top_k_gating on cpu (float32): reference" in done.stdout


def test_a_kernel_without_memory_raises_memory_error(unloaded, monkeypatch):
    """The library is simulated: its kernel finds no memory."""
    monkeypatch.setattr(native, "_library", native.Library("baseline", (), SimpleNamespace(kpt_sort=lambda a: 1)))
    with pytest.raises(MemoryError, match="kpt_sort"):
        native.run("kpt_sort", 0, 0, 0, 0, 0, 0)


def test_torch_s_own_pool_of_threads_is_found():
    if "OpenMP" not in torch.__config__.parallel_info() or sys.platform != "linux":
        pytest.skip("this torch does not compute with OpenMP's threads")
    assert None not in native._openmp_of_torch()


OPENMP = """
int calls = 0;
int omp_get_thread_num(void) { return 0; }
void GOMP_parallel(void (*task)(void*), void* data, unsigned threads, unsigned flags) { calls++; task(data); }
"""
WHICH = """
import ctypes, os, sys
def see():
    ctypes.CDLL(sys.argv[1], mode=os.RTLD_GLOBAL)
if sys.argv[2] == "made global before torch":
    see()
import torch
if sys.argv[2] == "made global after torch":
    see()
torch.set_num_threads(2)
torch.ones(1_000_000).exp_()
from kpt_backend_cpu import native
other = ctypes.CDLL(sys.argv[1])
found = native._openmp_of_torch()[0] == ctypes.cast(other.GOMP_parallel, ctypes.c_void_p).value
print(found, ctypes.c_int.in_dll(other, "calls").value > 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems resolve names otherwise")
@pytest.mark.parametrize("how", ["preloaded", "made global before torch", "made global after torch"])
def test_the_pool_is_that_of_torch_where_there_is_another_openmp(how, tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or "OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("there is no C compiler, or torch does not compute with OpenMP's threads")
    (tmp_path / "other.c").write_text(OPENMP)
    other = tmp_path / "libother.so"
    subprocess.run([compiler, "-shared", "-fPIC", tmp_path / "other.c", "-o", other], check=True)
    environment = {**os.environ, **({"LD_PRELOAD": str(other)} if how == "preloaded" else {})}
    command = [sys.executable, "-c", WHICH, other, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    expected = str(how != "made global after torch")
    assert done.stdout.split() == [expected, expected], "what torch computes with is what is found"


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("own", [False, True], ids=["torch's pool", "own threads"])
def test_python_threads_compute_right_at_once(own, kernels, unloaded, monkeypatch, two_threads):
    monkeypatch.setattr(native, "_forked", own)
    start, wrong = threading.Barrier(4), []

    def work(number):
        start.wait()
        for turn in range(20):
            if not is_right(kernels, rows=20 + number * 31 + turn):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Products(torch.utils.data.Dataset):
    """Computed in workers, which are forked from a process that used its pool of threads."""

    def __init__(self, kernels):
        self.kernels = kernels

    def __len__(self):
        return 4

    def __getitem__(self, index):
        # More than torch gives a worker: a pool that was left behind in the parent would be waited for.
        return is_right(self.kernels, rows=200 + index, threads=2), native._forked, os.getpid()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_workers_of_a_data_loader_compute_right(kernels, two_threads):
    assert is_right(kernels)
    loader = torch.utils.data.DataLoader(
        Products(kernels), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    results = list(loader)
    assert [right for right, *_ in results] == [True] * 4
    assert all(forked for _, forked, _ in results)
    assert os.getpid() not in {pid for *_, pid in results}
    assert is_right(kernels), "and the parent goes on"


@pytest.fixture
def served(kernels):
    """A layer of few rows that was called before, so that the kernel has prepared its call, and its input."""
    layer, x = FewRowsLinear.from_linear(torch.nn.Linear(64, 48)).eval(), torch.randn(2, 64)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
        yield layer, x


def expected(layer, x):
    return torch.nn.functional.linear(x, layer.weight, layer.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_prepared_computes_what_forward_does(kernels, dtype, bias):
    calls = [(torch.randn(3, 40).to(dtype), torch.randn(24, 40).to(dtype)) for _ in range(3)]
    added = torch.randn(24).to(dtype) if bias else None
    with torch.no_grad():
        for x, weight in calls:
            assert torch.equal(linear(x, weight, added), few_rows.forward(linear.bind(x, weight, added)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "position": 28, "softcap": 3.0, "scale": 0.3}], ids=["", "set"]
)
@pytest.mark.parametrize("return_lse", [True, False])
def test_steps_of_decoding_that_are_prepared_are_those_of_forward(kernels, dtype, options, return_lse):
    attend, known = get_op("attention.dense"), {"return_lse": return_lse, **options}
    for turn in range(4):
        q, k, v = (torch.randn(2, *size).to(dtype) for size in ((6, 2, 24), (3, 31, 24), (3, 31, 16)))
        q = q if turn < 3 else torch._neg_view(q)
        with torch.no_grad():
            for one, other in zip(attend(q, k, v, **known), kernels["dense"](q, k, v, **known), strict=True):
                assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("granularity", ["tensor", "row", "128x128"])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_8_bits_that_are_prepared_are_those_of_forward(kernels, granularity, bias):
    multiply = get_op("fp8.linear")
    added = torch.randn(200) if bias else None
    for turn in range(4):
        x, weight = torch.randn(3, 300), torch.randn(200, 300)
        x = x if turn < 3 else torch._neg_view(x)
        codes, scale = get_op("fp8.quantize")(weight, granularity=granularity)
        with torch.no_grad():
            got = multiply(x, codes, scale, added, granularity=granularity)
            assert torch.equal(got, kernels["linear"](x, codes, scale, added, granularity=granularity))
            torch.testing.assert_close(
                got, multiply.reference(x, codes, scale, added, granularity=granularity), rtol=1e-4, atol=1e-3
            )


def test_what_is_prepared_sees_new_weights(served):
    layer, x = served
    layer.weight.mul_(2)
    torch.testing.assert_close(layer(x), expected(layer, x))
    layer.load_state_dict({name: torch.randn_like(value) for name, value in layer.state_dict().items()})
    torch.testing.assert_close(layer(x), expected(layer, x))
    layer.load_state_dict(
        {name: torch.randn_like(value) for name, value in layer.state_dict().items()}, assign=True
    )  # another tensor
    torch.testing.assert_close(layer(x), expected(layer, x))
    layer.bfloat16()
    torch.testing.assert_close(layer(x.bfloat16()), expected(layer, x.bfloat16()), atol=2e-2, rtol=2e-2)
    for other in (copy.deepcopy(layer.float()), pickle.loads(pickle.dumps(layer))):
        other.weight.zero_()
        assert torch.equal(other(x), other.bias.expand(2, -1))
        torch.testing.assert_close(layer(x), expected(layer, x))


def test_what_is_prepared_reads_no_memory_that_is_not_there(served):
    layer, x = served
    negative = torch._neg_view(x)
    torch.testing.assert_close(layer(negative), expected(layer, -x))
    layer.weight.untyped_storage().resize_(0)
    with pytest.raises(InputError, match=r"weight .* has no memory"):
        layer(x)


def test_what_is_prepared_serves_several_threads(served):
    layer, _ = served
    inputs, found = [torch.randn(2, 64) for _ in range(4)], {}

    def work(place):
        with torch.no_grad():
            found[place] = [layer(inputs[place]) for _ in range(50)]

    workers = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    for place, x in enumerate(inputs):
        for got in found[place]:
            torch.testing.assert_close(got, expected(layer, x))
