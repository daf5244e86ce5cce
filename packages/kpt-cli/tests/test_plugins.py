"""Plug-ins of other people, good and bad, as installed distributions."""

import json

import pytest

BACKEND = """
    import kpt_core

    class Backend(kpt_core.Backend):
        name, device_types = "{name}", ("cpu",)

    BACKEND = Backend()
"""


def test_good_plugin_is_listed_with_its_origin(kpt_process, install):
    plugins = install("acme-kernels", "[kpt.backends]\nacme = acme_a:BACKEND\n", acme_a=BACKEND.format(name="acme"))
    done = kpt_process("doctor", "--json", plugins=plugins)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(b["name"], b["origin"]) for b in document["backends"] if b["name"] == "acme"] == [
        ("acme", "acme-kernels 1.0")
    ]
    assert {"name": "acme-kernels", "version": "1.0", "offers": ["kpt.backends: acme"]} in document["packages"]


BROKEN = {
    "raises at import": ("acme = acme_a:BACKEND", "raise RuntimeError('acme is out of order')", "acme is out of order"),
    "module is missing": ("acme = acme_nowhere:BACKEND", "", "acme_nowhere"),
    "attribute is missing": ("acme = acme_a:BACKEND", "", "BACKEND"),
    "no backend": ("acme = acme_a:BACKEND", "BACKEND = object()", "is no backend"),
    "other name": ("acme = acme_a:BACKEND", BACKEND.format(name="emca"), "calls itself 'emca'"),
}


@pytest.mark.parametrize(("entry", "source", "said"), BROKEN.values(), ids=list(BROKEN))
def test_broken_plugin_is_named_by_doctor_and_does_not_stop_the_others(kpt_plugged, install, entry, source, said):
    plugins = install("acme-kernels", f"[kpt.backends]\n{entry}\n", acme_a=source)
    done = kpt_plugged("doctor", "--json", plugins=plugins)
    assert done.exit_code == 1, done.stderr
    (problem,) = json.loads(done.stdout)["problems"]
    assert "acme-kernels 1.0" in problem
    assert said in problem
    assert done.stderr == ""

    done = kpt_plugged("kernels", "moe.experts", plugins=plugins)
    assert done.exit_code == 0, done.stderr
    assert "moe.experts" in done.stdout
    assert done.stderr.count("kpt: warning: KPT goes on without") == 1
    assert "acme-kernels 1.0" in done.stderr


def test_doctor_says_it_in_text_too(kpt_plugged, install):
    plugins = install("acme-kernels", "[kpt.backends]\nacme = acme_nowhere:BACKEND\n")
    done = kpt_plugged("doctor", plugins=plugins)
    assert done.exit_code == 1
    assert "Problems" in done.stdout
    assert "acme-kernels 1.0" in done.stdout
    assert done.stdout.endswith("1 problem found.\n")
    assert isinstance(done.exception, SystemExit)


def test_two_plugins_with_one_name_are_both_named(kpt_plugged, install):
    install("acme-kernels", "[kpt.backends]\nacme = acme_a:BACKEND\n", acme_a=BACKEND.format(name="acme"))
    plugins = install("emca-kernels", "[kpt.backends]\nacme = acme_b:BACKEND\n", acme_b=BACKEND.format(name="acme"))
    done = kpt_plugged("doctor", "--json", plugins=plugins)
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    (problem,) = document["problems"]
    assert "acme-kernels 1.0" in problem
    assert "emca-kernels 1.0" in problem
    assert all(backend["name"] != "acme" for backend in document["backends"])

    done = kpt_plugged("kernels", "--json", plugins=plugins)
    assert done.exit_code == 0
    assert json.loads(done.stdout)["problems"] == [problem]


def test_kpt_use_of_an_unknown_backend(kpt_plugged, install, monkeypatch):
    monkeypatch.setenv("KPT_USE", "amce")
    plugins = install("acme-kernels", "[kpt.backends]\nacme = acme_a:BACKEND\n", acme_a=BACKEND.format(name="acme"))
    done = kpt_plugged("doctor", "--json", plugins=plugins)
    assert (done.exit_code, done.stderr) == (1, "")
    assert "no name 'amce' is installed (did you mean acme?)" in str(json.loads(done.stdout)["problems"])
