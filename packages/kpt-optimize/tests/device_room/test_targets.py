"""Devices that are not here, with backends that are not installed."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

import kpt_core
from kpt_core import Kernel, UnknownNameError
from kpt_optimize.devices import AcceleratorBackend, Peaks
from kpt_optimize.devices.products import PRODUCTS
from kpt_optimize.devices.targets import chips, served, target_of
from kpt_optimize.forecast import Step


class Acme(AcceleratorBackend):
    name, device_types, chips = "acme", ("xpu",), ("a1", "a2", "a0")
    products: ClassVar = {
        "Acme One Pro": Peaks("a1", 80, 100.0, 1000.0, "a leaflet", 200.0),
        "Acme One": Peaks("a1", 40, 50.0, 1000.0, "a leaflet"),
    }

    def why_no_device(self):
        return "none is here"

    def properties_of(self, product, chip):
        return SimpleNamespace(name=product, chip=chip)

    def describe(self, properties):
        return {
            "capabilities": frozenset({"acme", *(["fp8_e4m3fn"] if properties.chip == "a1" else [])}),
            "unsupported": "a0 is too old" if properties.chip == "a0" else None,
            "peaks": self.products.get(properties.name),
        }

    def kernels(self):
        here = f"{__name__}:run"
        return (
            Kernel(
                "targets.scale", here, requires={"acme"}, dtypes={"bfloat16"}, unsupported=f"{__name__}:unsupported"
            ),
            Kernel("targets.scale", f"{__name__}:run_more", requires={"more"}, priority=9),
        )


def run(call):
    return call.x


run_more = run


def unsupported(call):
    return "too long" if len(call.x) > 4 else None


@kpt_core.op("targets.scale")
def scale(x: torch.Tensor) -> torch.Tensor:
    """Multiply by two."""
    return x * 2


@pytest.fixture(autouse=True)
def _acme(monkeypatch):
    monkeypatch.setattr("kpt_core.registry._added", {"acme": Acme()})


def call(length=2, dtype=torch.bfloat16):
    return scale.bind(torch.empty(length, dtype=dtype, device="meta"))


@pytest.mark.parametrize(
    ("name", "chip", "product"),
    [
        ("a1", "a1", "Acme One Pro"),
        ("A1", "a1", "Acme One Pro"),
        ("acme pro", "a1", "Acme One Pro"),
        ("a2", "a2", "a2"),
        ("cpu", "cpu", "this machine's processor"),
    ],
)
def test_a_target_is_named_by_chip_or_by_words_of_a_product(name, chip, product):
    found = target_of(name)
    assert (found.chip, found.product) == (chip, product)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a3", "did you mean '.*'a[012]'"),
        ("MI300XX", "did you mean 'mi300x'"),
        ("gfx9", "did you mean 'gfx"),
        ("h1000", "did you mean 'h100'"),
        ("", "known: "),
        ("nothing alike", "known: .* more"),
    ],
)
def test_what_nobody_knows_is_refused_with_close_names(name, said):
    with pytest.raises(UnknownNameError, match=f"unknown target '{name.lower()}': .*{said}") as caught:
        target_of(name)
    assert len(str(caught.value)) < 300
    assert {"a0", "a1", "a2", "gfx942"} <= set(chips())


PUBLISHED = [(vendor, name, peaks) for vendor, products in PRODUCTS.items() for name, peaks in products.items()]


@pytest.mark.parametrize(("vendor", "product", "peaks"), PUBLISHED, ids=[product for _, product, _ in PUBLISHED])
def test_products_and_chips_are_known_without_their_vendors_backend(vendor, product, peaks):
    found = target_of(product)
    assert (found.product, found.chip, found.backend) == (product, peaks.chip, None)
    assert found.missing == f"kpt-backend-{vendor}"
    assert (found.memory, found.tflops("bfloat16")) == (peaks.memory * 2**30, peaks.bf16_tflops)
    assert found.tflops("float8_e4m3fn") == (peaks.fp8_tflops or peaks.bf16_tflops)
    assert target_of(peaks.chip.upper()).chip == peaks.chip


def test_a_backend_that_is_installed_tells_of_its_products_itself(monkeypatch):
    own = {"acme": {"Acme One": Peaks("a1", 1, 1.0, 1.0, "another leaflet")}}
    monkeypatch.setattr("kpt_optimize.devices.targets.PRODUCTS", own)
    found = target_of("acme one")
    assert (found.product, found.peaks.memory, found.missing) == ("Acme One Pro", 80, None)


def test_kernels_are_chosen_by_the_chip_that_is_not_here():
    found = served(scale, call(), target_of("a1"))
    assert (found.backend, found.kernel.forward) == ("acme", f"{__name__}:run")
    assert list(map(str, found.refusals)) == [f"acme ({__name__}:run_more): needs more, which a1 lacks"]


@pytest.mark.parametrize(
    ("target", "made", "reason"),
    [
        ("a0", call(), "a0 is too old"),
        ("a1", call(5), "too long"),
        ("a1", call(dtype=torch.float32), "dtype float32; needs bfloat16"),
    ],
)
def test_what_no_kernel_takes_goes_to_the_reference_and_is_told(target, made, reason):
    found = served(scale, made, target_of(target))
    assert (found.backend, found.kernel) == ("reference", None)
    assert found.refusals[-1].reason == reason


def test_rates_are_those_of_the_dtype_as_far_as_they_are_known():
    found = target_of("a1")
    rates = [found.tflops(dtype) for dtype in ("bfloat16", "float8_e4m3fn", "float32")]
    assert rates == [100.0, 200.0, None]
    assert target_of("a2").tflops("bfloat16") is None
    assert (found.memory, target_of("a2").memory) == (80 * 2**30, None)
    assert target_of("cpu").memory > 2**28


def test_a_roofline_is_the_slower_of_arithmetic_and_memory():
    peaks = Acme.products["Acme One Pro"]
    assert Step("", int(1e14), int(1e9)).seconds(peaks, 100.0) == (1.0, "arithmetic")
    assert Step("", int(1e12), int(1e12)).seconds(peaks, 100.0) == (1.0, "memory")
    assert Step("", int(1e14), int(1e9)).seconds(peaks, None) == (0.001, "memory")
