import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType

import pytest

import kpt_vllm
from kpt_core import InputError, PluginWarning


def run(program: str, **env: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()


def test_vllm_finds_the_plugin():
    (found,) = (each for each in entry_points(group="vllm.general_plugins") if each.name == "kpt")
    assert found.load() is kpt_vllm.register


@pytest.mark.parametrize("value", ["0", "false"])
def test_nothing_is_imported_before_vllm_asks_nor_where_it_is_switched_off(value):
    program = "import sys, kpt_vllm; kpt_vllm.register(); print({'torch', 'vllm', 'kpt_core'} & {*sys.modules})"
    assert run(program, KPT_VLLM=value) == "set()"


def test_another_value_of_the_switch_is_refused(monkeypatch):
    monkeypatch.setenv("KPT_VLLM", "off")
    with pytest.raises(InputError, match="KPT_VLLM='off': expected 0"):
        kpt_vllm.register()


def test_a_vllm_without_the_hook_runs_its_own_experts(monkeypatch):
    monkeypatch.delitem(sys.modules, "kpt_vllm.experts", raising=False)
    monkeypatch.delattr(kpt_vllm, "experts", raising=False)
    monkeypatch.setitem(sys.modules, "vllm.logger", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.warns(PluginWarning, match=r"vLLM runs experts itself, not KPT: .* does not fit this vLLM \(.*vllm"):
        kpt_vllm.register()


def test_a_vllm_whose_method_has_no_hook_runs_its_own_experts(monkeypatch):
    monkeypatch.delitem(sys.modules, "kpt_vllm.experts", raising=False)
    monkeypatch.delattr(kpt_vllm, "experts", raising=False)
    layers = "vllm.model_executor.layers.fused_moe"
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", layers, f"{layers}.experts"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, attribute, value in (
        ("vllm.logger", "init_logger", lambda name: None),
        (f"{layers}.experts.cpu_moe", "CPUUnquantizedExperts", type("Experts", (), {})),
        (f"{layers}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod", type("Method", (), {})),
    ):
        module = ModuleType(name)
        setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.warns(PluginWarning, match=r"does not fit this vLLM \(.*register_oot"):
        kpt_vllm.register()
