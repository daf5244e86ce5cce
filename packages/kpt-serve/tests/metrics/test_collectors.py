import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from monitored import EXPERTS, Monitored, layer
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

import kpt_core
from kpt_core import KernelCount
from kpt_moe.statistics import RouterStatistics
from kpt_serve.errors import PackageError
from kpt_serve.metrics import (
    ExpertCollector,
    KernelCollector,
    RequestMetrics,
    TrainingCollector,
    experts,
    exposition,
    server_registry,
)


def test_requests_are_counted_by_protocol_and_code():
    registry = CollectorRegistry()
    requests = RequestMetrics(registry)
    for protocol, code, seconds in (("rest", "200", 0.003), ("rest", "200", 0.2), ("grpc", "RESOURCE_EXHAUSTED", 9.0)):
        requests.observe(protocol, code, seconds)
    for size in (1, 3, 4, 300):
        requests.batch(size)
    queue = [1, 2]
    requests.waiting(lambda: len(queue))
    value = registry.get_sample_value
    assert value("kpt_requests_total", {"protocol": "rest", "code": "200"}) == 2
    assert value("kpt_requests_total", {"protocol": "grpc", "code": "RESOURCE_EXHAUSTED"}) == 1
    assert value("kpt_request_duration_seconds_sum", {"protocol": "rest"}) == pytest.approx(0.203)
    assert value("kpt_request_duration_seconds_bucket", {"protocol": "rest", "le": "0.005"}) == 1
    assert [value("kpt_batch_requests_bucket", {"le": le}) for le in ("1.0", "2.0", "4.0", "256.0", "+Inf")] == [
        1, 1, 3, 3, 4,
    ]  # fmt: skip
    assert value("kpt_requests_waiting") == 2
    queue.clear()
    assert value("kpt_requests_waiting") == 0


def test_kernels_are_those_of_the_core(monkeypatch):
    counts = (
        KernelCount("moe.experts", "cpu", "cpu/moe.experts/f", calls=7, failures=2, quarantined=True),
        KernelCount("moe.experts", "reference", "reference", calls=5),
    )
    monkeypatch.setattr(kpt_core, "counts", lambda: counts)
    registry = CollectorRegistry()
    registry.register(KernelCollector())
    for each in counts:
        labels = {"op": each.op, "kernel": each.identity, "backend": each.backend}
        assert registry.get_sample_value("kpt_kernel_calls_total", labels) == each.calls
        assert registry.get_sample_value("kpt_kernel_failures_total", labels) == each.failures
        assert registry.get_sample_value("kpt_kernel_quarantined", labels) == each.quarantined
    assert registry.get_sample_value("kpt_accelerators") == torch.accelerator.device_count()


def test_registering_kernels_reads_no_counts(monkeypatch):
    monkeypatch.setattr(kpt_core, "counts", lambda: pytest.fail("counts were read before a scrape"))
    CollectorRegistry().register(KernelCollector())


def test_a_server_reports_its_model_process_and_kernels():
    server = Monitored()
    server.happen()
    registry = server.registry
    calls = [s for m in registry.collect() if m.name == "kpt_kernel_calls" for s in m.samples]
    assert {"moe.experts", "moe.top_k_gating"} <= {sample.labels["op"] for sample in calls}
    assert registry.get_sample_value("process_resident_memory_bytes") > 0
    tokens = [
        registry.get_sample_value("kpt_moe_expert_tokens_total", {"router": "router", "expert": str(expert)})
        for expert in range(EXPERTS)
    ]
    assert sum(tokens) == 5 * 2
    assert registry.get_sample_value("kpt_fp8_skipped_steps_total") == 1


def test_tokens_and_imbalance_are_of_the_window(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(experts, "monotonic", lambda: now[0])
    model = nn.ModuleDict({"a": layer()})
    registry = CollectorRegistry()
    registry.register(ExpertCollector(model))
    statistics = RouterStatistics(model)

    def imbalance() -> float | None:
        return registry.get_sample_value("kpt_moe_load_imbalance_ratio", {"router": "a.router"})

    assert imbalance() == 0
    model["a"](torch.randn(6, 8))
    first = statistics.snapshot()["a.router"]
    assert imbalance() == pytest.approx(first.imbalance)
    now[0] += experts.WINDOW - 1
    assert imbalance() == pytest.approx(first.imbalance)
    now[0] += 1
    assert imbalance() == 0  # nothing came in the window
    statistics.reset()
    model["a"](torch.ones(6, 8))  # one choice of all tokens
    now[0] += 1
    assert imbalance() == pytest.approx(statistics.snapshot()["a.router"].imbalance) == EXPERTS / 2
    served = [
        registry.get_sample_value("kpt_moe_expert_tokens_total", {"router": "a.router", "expert": str(expert)})
        for expert in range(EXPERTS)
    ]
    assert served == [a + b for a, b in zip(first.asked, statistics.snapshot()["a.router"].asked, strict=True)]


def test_who_scrapes_all_the_time_fills_no_memory():
    collector = ExpertCollector(nn.ModuleDict({"a": layer()}))
    for _ in range(20):
        collector.collect()
    assert len(collector._past) == 2


def test_refused_choices_are_counted():
    from kpt_moe import MoEConfig, MoELayer, TopKRouter

    router = TopKRouter(8, num_experts=EXPERTS, top_k=2, capacity_factor=0.5)
    model = MoELayer(MoEConfig(hidden_size=8, num_experts=EXPERTS, top_k=2, intermediate_size=8), router=router)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    registry = CollectorRegistry()
    registry.register(ExpertCollector(model))
    model(torch.ones(8, 8))
    # Each of the two chosen experts takes 8 * 2 / 4 * 0.5 = 2 of 8.
    assert registry.get_sample_value("kpt_moe_dropped_choices_total", {"router": "router"}) == 12


@pytest.mark.parametrize(("number", "shown"), [(64, True), (65, False)])
def test_many_experts_are_left_out_one_by_one_but_not_their_balance(number, shown):
    model = layer(number)
    registry = CollectorRegistry()
    registry.register(ExpertCollector(model))
    model(torch.ones(3, 8))
    labels = {"router": "router", "expert": "0"}
    assert (registry.get_sample_value("kpt_moe_expert_tokens_total", labels) is not None) == shown
    assert registry.get_sample_value("kpt_moe_load_imbalance_ratio", {"router": "router"}) == number / 2


def test_counting_ends():
    model = layer()
    collector = ExpertCollector.of(model)
    registry = CollectorRegistry()
    registry.register(collector)
    model(torch.ones(3, 8))
    collector.detach()
    collector.detach()
    model(torch.ones(3, 8))
    tokens = [sample.value for m in registry.collect() if m.name == "kpt_moe_expert_tokens" for sample in m.samples]
    assert sum(tokens) == 3 * 2
    assert not any(module._forward_hooks for module in model.modules())


def test_what_has_no_experts_has_no_such_metrics(monkeypatch):
    assert ExpertCollector.of(None) is None
    assert ExpertCollector.of(nn.Linear(2, 2)) is None
    with pytest.raises(kpt_core.InputError, match="Linear has neither"):
        ExpertCollector(nn.Linear(2, 2))
    monkeypatch.setattr(experts, "find_spec", lambda name: None if name == "kpt_moe" else find_spec(name))
    assert ExpertCollector.of(layer()) is None
    with pytest.raises(PackageError, match="pip install kpt-moe"):
        ExpertCollector(layer())


def test_an_engine_of_fp8_tells_its_skipped_steps():
    from kpt_fp8.training import FP8TrainingEngine

    model = nn.Sequential(nn.Linear(64, 64))
    engine = FP8TrainingEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    registry = CollectorRegistry()
    registry.register(TrainingCollector(engine))
    x = torch.ones(32, 64)
    engine.step(engine(x).square().mean())
    engine.step((engine(x) * float("nan")).mean())
    assert registry.get_sample_value("kpt_fp8_steps_total") == 2
    assert registry.get_sample_value("kpt_fp8_skipped_steps_total") == 1


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, "text/plain"),
        ("*/*", "text/plain"),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "application/openmetrics-text"),
    ],
)
def test_a_scrape_gets_the_format_that_it_asks_for(accept, content_type):
    body, given = exposition(server_registry(), accept)
    assert given.startswith(content_type)
    assert (b"# EOF" in body) == (content_type != "text/plain")
    if content_type == "text/plain":
        assert "kpt_accelerators" in {family.name for family in text_string_to_metric_families(body.decode())}


def test_the_package_imports_no_client_of_prometheus():
    program = "import sys, kpt_serve; sys.exit(' '.join({'prometheus_client', 'torch'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_kernels_are_registered_without_torch():
    program = (
        "import sys; from kpt_serve.metrics import server_registry; server_registry(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
