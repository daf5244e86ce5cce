"""Strict parsing of a manifest's JSON: every key is known, every value of its type, and errors name both."""

import json
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from kpt_serve.errors import PackageError

T = TypeVar("T")

AGAIN = "copy the package again, or export the model again"
_PLAIN = re.compile(r"[A-Za-z0-9_][\w.+@ -]{0,199}", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z0-9_][\w.-]{0,127}", re.ASCII)


def parse_json(content: bytes, place: str) -> Any:
    """Return what JSON in UTF-8 says, without duplicate keys and without numbers that JSON does not have."""
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise PackageError(f"{place} is no manifest: {error}; {AGAIN}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in found if keys.count(key) > 1)!r} is there twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def wrong(place: str, found: object, wanted: str) -> PackageError:
    """Return the error for a value at a place, which says what was expected."""
    text = repr(found)
    return PackageError(f"{place} is {text if len(text) <= 120 else text[:120] + '…'}; expected {wanted}: {AGAIN}")


def is_plain(name: str) -> bool:
    """Return whether a name can be a file's on any system, and leads nowhere else."""
    return _PLAIN.fullmatch(name) is not None and not name.endswith((".", " "))


class Fields:
    """The keys of an object, each of which is taken once."""

    def __init__(self, document: object, place: str) -> None:
        if not isinstance(document, dict):
            raise wrong(place, document, "an object")
        self._left, self._place = dict(document), place

    def take(self, key: str, parse: Callable[[Any, str], T]) -> T:
        """Return the value of a key, parsed."""
        if key not in self._left:
            raise PackageError(f"{self._place} has no key {key!r}; {AGAIN}")
        return parse(self._left.pop(key), f"{self._place}: {key!r}")

    def end(self) -> None:
        """Raise if a key was not taken."""
        for key in self._left:
            newer = "install a newer kpt-serve"
            raise PackageError(f"{self._place} has an unknown key {key!r}; format 1 has none: {newer}, or {AGAIN}")


def whole(value: Any, place: str) -> int:
    """Return a whole number, which a flag is not."""
    if type(value) is not int:
        raise wrong(place, value, "a whole number")
    return value


def text(value: Any, place: str) -> str:
    """Return a text that can be printed."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise wrong(place, value, "a text")
    return value


def identifier(value: Any, place: str) -> str:
    """Return the name of an op, a distribution, a device type or a dtype."""
    if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value):
        raise wrong(place, value, "a name of letters, digits, '.', '-' and '_'")
    return value


def plain_name(value: Any, place: str) -> str:
    """Return a name that can be a folder's."""
    if not isinstance(value, str) or not is_plain(value):
        raise wrong(place, value, "a plain name, which can be a folder's")
    return value


def choice(values: Collection[str]) -> Callable[[Any, str], Any]:
    """Return a parser of one of these values."""

    def parse(value: Any, place: str) -> str:
        if not isinstance(value, str) or value not in values:
            raise wrong(place, value, " or ".join(map(repr, values)))
        return value

    return parse


def unique_list(parse: Callable[[Any, str], T], unique: str = "") -> Callable[[Any, str], tuple[T, ...]]:
    """Return a parser of a list without duplicates: of whole entries, or of the field `unique`."""

    def parse_all(value: Any, place: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise wrong(place, value, "a list")
        found = tuple(parse(each, f"{place}[{index}]") for index, each in enumerate(value))
        seen = set()
        for index, each in enumerate(found):
            key = getattr(each, unique) if unique else each
            if key in seen:
                raise wrong(f"{place}[{index}]", key, "each name once; it is there twice")
            seen.add(key)
        return found

    return parse_all


def version_range(value: Any, place: str) -> str:
    """Return a version range, as `>=0.1,<0.2`."""
    try:
        SpecifierSet(text(value, place))
    except InvalidSpecifier as error:
        raise wrong(place, value, "a version range, as '>=0.1,<0.2'") from error
    return str(value)
