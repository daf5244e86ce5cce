"""Every public name says what it is and is shown in code that runs; a function gives the shapes of its tensors."""

import dataclasses
import inspect
import re
from importlib import import_module

import pytest
from public_names import ROOT, page_showing, public_names

PACKAGES = (
    *("kpt-core", "kpt-optimize", "kpt-moe", "kpt-fp8", "kpt-attention", "kpt-conformance", "kpt-serve"),
    *(f"kpt-backend-{vendor}" for vendor in ("cpu", "nvidia", "amd", "xpu", "tpu")),
)
NAMES = [
    (module, name)
    for package in PACKAGES
    for module, names in public_names(ROOT / "packages" / package).items()
    for name in names
]
#: What begins a sentence without a verb.
NO_VERB = {
    *("A", "An", "As", "Bytes", "For", "How", "If", "In", "It", "Its", "Lines", "No", "One", "The", "These", "This"),
    *("Two", "What", "When", "Where", "Whether", "Which", "Who", "Why"),
}
TENSOR = re.compile(r"^(<class 'torch\.Tensor'>|(torch\.)?Tensor( \| None)?)$")
SHAPE = re.compile(r"`\[.*?\]|shape", re.S)


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{module}.{name}" for module, name in NAMES])
def test_a_public_name_is_documented(module: str, name: str) -> None:
    found = getattr(import_module(module), name)
    if not callable(found) or not hasattr(found, "__module__") or getattr(found, "__origin__", None) or found is str:
        return  # a constant or the name of a type, which have no docstring of their own
    text = inspect.getdoc(found) or ""
    assert re.match(r"[A-Z`]", text), (
        f"{module}.{name} has no docstring, or one that begins in lower case: {text[:60]!r}"
    )
    # Errors, and results without methods to speak of, come from what is shown.
    # Protocols are what somebody else writes.
    result = inspect.isclass(found) and (
        issubclass(found, Exception | tuple) or dataclasses.is_dataclass(found) or getattr(found, "_is_protocol", False)
    )
    assert result or "Examples:" in text or page_showing(name), (
        f"no code of a document uses {module}.{name}: show it in docs/by-example, or under 'Examples:' in its docstring"
    )
    assert "\nExample:\n" not in text, f"{module}.{name}: the site shows code under `Examples:`, not under `Example:`"
    if inspect.isclass(found):
        return
    first = text.split(maxsplit=1)[0]
    verb = re.fullmatch(r"[A-Z][a-z]+", first) is not None and first not in NO_VERB
    assert verb, f"the docstring of {module}.{name} begins with {first!r}: begin with a verb, as in 'Return the ...'"
    parameters = inspect.signature(found).parameters.values()
    tensors = [each.name for each in parameters if TENSOR.search(str(each.annotation))]
    assert not tensors or SHAPE.search(text), f"{module}.{name} takes {tensors} and gives no shape, such as `[rows, N]`"
