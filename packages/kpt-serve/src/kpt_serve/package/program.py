"""What the graph of a program may hold: the schema of torch 2.13, and of it what `torch.export.load` runs no code of.

That function makes Python of what it reads, and runs it: names of inputs and keys of dictionaries become part of a
function's source, targets of nodes are looked up from `torch` on (`torch.os.system` is one), structures of inputs
import the modules that they name, and sizes and guards are evaluated. So each field is known, and each text has a form.
"""

import json
import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any

from kpt_serve.errors import PackageError

from .expressions import is_guard, is_size, is_symbol

#: What torch 2.13 writes; another schema may have fields that nobody has looked at.
_SCHEMA = {"major": 8, "minor": 20}
_AGAIN = "export the model again with torch 2.13"
_TARGET = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.([a-zA-Z]\w*)")
#: Namespaces of ops. PyTorch's read and write no files but by these.
_NAMESPACES = frozenset(("aten", "kpt"))
_FILES = frozenset(("aten.from_file", "aten.save"))
_DUNDER = frozenset(("__and__", "__or__", "__xor__", "__lshift__", "__rshift__"))
_PLAIN = re.compile(
    r"torch\.ops\.higher_order\.(cond|scan|while_loop|map_impl|associative_scan|wrap_with_set_grad_enabled)|"
    r"torch\.sym_(not|int|float|ite|max|min|sqrt)|math\.trunc|"
    r"_operator\.(eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_|lshift|rshift|getitem)"
)
_KEY = re.compile(r"[\w.:/ -]{0,512}")
_DEEPEST = 200  #: levels of JSON

Check = Callable[[Any, str], None]


def check_program(content: bytes, place: str) -> None:
    """Raise unless a program's JSON is of the schema of torch 2.13 and loading it runs no code of it.

    Args:
        content: JSON.
        place: What errors begin with: the file and the entry.

    Raises:
        PackageError: It names the field and what it holds.
    """
    try:
        # As torch reads it, which takes no other encoding.
        program = json.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise PackageError(f"{place} is no JSON: {error}; {_AGAIN}") from error
    schema = program.get("schema_version") if isinstance(program, dict) else None
    if schema != _SCHEMA:
        version = program.get("torch_version") if isinstance(program, dict) else None
        wanted = ".".join(map(str, _SCHEMA.values()))
        raise PackageError(f"{place} has schema {schema!r} of torch {version!r}; expected {wanted} of 2.13: {_AGAIN}")
    try:
        _PROGRAM(program, place + ", ")
    except RecursionError as error:
        raise PackageError(f"{place} is nested too deeply; {_AGAIN}") from error


def _refuse(place: str, found: object, wanted: str) -> PackageError:
    text = repr(found)
    return PackageError(f"{place} is {text if len(text) <= 120 else text[:120] + '…'}; expected {wanted}; {_AGAIN}")


def _kind(*kinds: type) -> Check:
    """Return a check that a value is of one of these types, of which a flag is no number."""

    def check(value: Any, place: str) -> None:
        if type(value) not in kinds:
            raise _refuse(place, value, " or ".join(kind.__name__ for kind in kinds))

    return check


def _text(holds: Callable[[str], bool], wanted: str) -> Check:
    def check(value: Any, place: str) -> None:
        if not isinstance(value, str) or not holds(value):
            raise _refuse(place, value, wanted)

    return check


def _one_of(*values: object) -> Check:
    def check(value: Any, place: str) -> None:
        if value not in values:
            raise _refuse(place, value, " or ".join(map(repr, values)))

    return check


def _optional(inner: Check) -> Check:
    return lambda value, place: None if value is None else inner(value, place)


def _list(inner: Check) -> Check:
    def check(value: Any, place: str) -> None:
        if not isinstance(value, list):
            raise _refuse(place, value, "a list")
        for index, each in enumerate(value):
            inner(each, f"{place}[{index}]")

    return check


def _map(key: Check, inner: Check) -> Check:
    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise _refuse(place, value, "an object")
        for name, each in value.items():
            key(name, f"{place}, a key")
            inner(each, f"{place}[{name!r}]")

    return check


def _record(fields: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Return a check of an object that has these fields, perhaps the optional ones, and no other."""
    known = {**fields, **(optional or {})}

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise _refuse(place, value, "an object")
        for name in fields.keys() - value.keys():
            raise PackageError(f"{place} has no {name!r}; {_AGAIN}")
        for name, each in value.items():
            if name not in known:
                raise PackageError(f"{place} has {name!r}, which programs of KPT don't have; {_AGAIN}")
            known[name](each, f"{place}.{name}" if place[-1] != " " else place + name)

    return check


def _union(**fields: Check) -> Check:
    """Return a check of an object that has exactly one of these fields."""
    inner = _record({}, fields)

    def check(value: Any, place: str) -> None:
        inner(value, place)
        if len(value) != 1:
            raise _refuse(place, value, "an object with one key")

    return check


def _is_name(text: str) -> bool:
    # The longest that torch makes of a weight's path is far shorter; Python's own names may be any letters.
    return text.isidentifier() and text.isascii() and not keyword.iskeyword(text) and not text.startswith("__")


def _is_target(text: str) -> bool:
    if found := _TARGET.fullmatch(text):
        namespace, op, _ = found.groups()
        plain = not op.startswith("__") or op in _DUNDER
        return namespace in _NAMESPACES and plain and f"{namespace}.{op}" not in _FILES
    return _PLAIN.fullmatch(text) is not None


def _is_structure(text: str) -> bool:
    """Return whether a text is a structure of tuples, lists and dictionaries, whose keys can stand in source."""
    try:
        structure = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(structure, list) and len(structure) == 2 and structure[0] == 1 and _is_tree(structure[1], 0)


def _is_tree(node: Any, depth: int) -> bool:
    if not isinstance(node, dict) or node.keys() != {"type", "context", "children_spec"} or depth > _DEEPEST:
        return False
    kind, context, children = node["type"], node["context"], node["children_spec"]
    if not isinstance(children, list) or not all(_is_tree(child, depth + 1) for child in children):
        return False
    if kind is None:
        return context is None and not children
    if kind in ("builtins.tuple", "builtins.list", "torch.fx.immutable_collections.immutable_list"):
        return context in ("null", None)
    if kind in ("builtins.dict", "collections.OrderedDict", "torch.fx.immutable_collections.immutable_dict"):
        return _is_keys(context, len(children))
    return False


def _is_keys(context: Any, count: int) -> bool:
    try:
        keys = json.loads(context)
    except (TypeError, ValueError, RecursionError):
        return False
    if not isinstance(keys, list) or len(keys) != count:
        return False
    return all(type(key) is int or (isinstance(key, str) and _KEY.fullmatch(key)) for key in keys)


def _is_call(text: str) -> bool:
    """Return whether a text is the structure of a call's arguments: positional ones, then those with a name."""
    if not _is_structure(text):
        return False
    node = json.loads(text)[1]
    if node["type"] != "builtins.tuple" or len(node["children_spec"]) != 2:
        return False
    positional, named = node["children_spec"]
    if positional["type"] != "builtins.tuple" or named["type"] != "builtins.dict":
        return False
    return all(isinstance(key, str) and _is_name(key) for key in json.loads(named["context"]))


_int, _bool, _float, _string = _kind(int), _kind(bool), _kind(float, int, str), _kind(str)
_name = _text(_is_name, "a name")
_empty_or_name = _text(lambda text: not text or _is_name(text), "a name")
_parameter = _text(lambda text: re.fullmatch(r"\w*", text) is not None, "an argument's name")
_symbol = _text(is_symbol, "the name of a size, as 's77'")
_named = _record({"name": _name})
_hint = _optional(_union(as_int=_int, as_bool=_bool, as_float=_float))
_size_wanted = "a size of names, numbers and functions that torch writes: torch.export.load evaluates it as Python"
_expression = _record({"expr_str": _text(is_size, _size_wanted)}, {"hint": _hint})
_sym_int = _union(as_expr=_expression, as_int=_int)
_sym_float = _union(as_expr=_expression, as_float=_float)
_sym_bool = _union(as_expr=_expression, as_bool=_bool)
_device = _record({"type": _text(str.isalpha, "a device's type")}, {"index": _optional(_int)})
_tensor = _record(
    {
        "dtype": _int,
        "sizes": _list(_sym_int),
        "requires_grad": _bool,
        "device": _device,
        "strides": _list(_sym_int),
        "storage_offset": _sym_int,
        "layout": _int,
    }
)
_int_argument = _union(as_name=_name, as_int=_int)
_float_argument = _union(as_name=_name, as_float=_float)
_bool_argument = _union(as_name=_name, as_bool=_bool)
_optional_tensor = _union(as_tensor=_named, as_none=_bool)


def _argument(value: Any, place: str) -> None:
    _ARGUMENT(value, place)


def _graph(value: Any, place: str) -> None:
    _GRAPH(value, place)


#: Objects and the operators of other programs (`as_custom_obj`, `as_operator`) are no arguments.
_ARGUMENT = _union(
    as_none=_bool,
    as_tensor=_named,
    as_tensors=_list(_named),
    as_int=_int,
    as_ints=_list(_int),
    as_float=_float,
    as_floats=_list(_float),
    as_string=_string,
    as_strings=_list(_string),
    as_sym_int=_int_argument,
    as_sym_ints=_list(_int_argument),
    as_scalar_type=_int,
    as_memory_format=_int,
    as_layout=_int,
    as_device=_device,
    as_bool=_bool,
    as_bools=_list(_bool),
    as_sym_bool=_bool_argument,
    as_sym_bools=_list(_bool_argument),
    as_graph=_record({"name": _name, "graph": _graph}),
    as_optional_tensors=_list(_optional_tensor),
    as_sym_float=_float_argument,
    as_sym_floats=_list(_float_argument),
    as_optional_tensor=_optional_tensor,
    as_complex=_record({"real": _float, "imag": _float}),
    as_nested_tensors=_list(_list(_named)),
    as_int_lists=_list(_list(_int)),
    as_string_to_argument=_map(_string, _argument),
    as_float_lists=_list(_list(_float)),
)
_metadata = _map(_name, _string)
_node = _record(
    {
        "target": _text(_is_target, "an op of aten or kpt that reads and writes no file, or arithmetic on sizes"),
        "inputs": _list(_record({"name": _parameter, "arg": _argument}, {"kind": _optional(_int)})),
        "outputs": _list(_argument),
        "metadata": _metadata,
    },
    {"is_hop_single_tensor_return": _optional(_bool), "name": _optional(_name)},
)
_GRAPH = _record(
    {
        "inputs": _list(_argument),
        "outputs": _list(_argument),
        "nodes": _list(_node),
        "tensor_values": _map(_name, _tensor),
        "sym_int_values": _map(_name, _sym_int),
        "sym_bool_values": _map(_name, _sym_bool),
    },
    {
        "is_single_tensor_return": _bool,
        "custom_obj_values": _one_of({}),
        "sym_float_values": _map(_name, _sym_float),
    },
)
_value = _union(as_none=_bool, as_int=_int, as_float=_float, as_string=_string, as_bool=_bool)
_user = _record({"arg": _argument})
#: Parameters, buffers, constants and objects would be in the file.
_signature = _record(
    {
        "input_specs": _list(
            _union(user_input=_user, constant_input=_record({"name": _empty_or_name, "value": _value}))
        ),
        "output_specs": _list(_union(user_output=_user)),
    }
)
_call = _record(
    {
        "inputs": _list(_argument),
        "outputs": _list(_argument),
        "in_spec": _text(_is_call, "arguments of tuples, lists and dictionaries with plain keys"),
        "out_spec": _text(_is_structure, "results of tuples, lists and dictionaries with plain keys"),
    },
    {"forward_arg_names": _optional(_list(_name))},
)
_path = _text(lambda text: re.fullmatch(r"[\w.@]*", text) is not None, "a module's path")
_PROGRAM = _record(
    {
        "graph_module": _record(
            {
                "graph": _graph,
                "signature": _signature,
                "module_call_graph": _list(_record({"fqn": _path}, {"signature": _optional(_call)})),
            },
            {"metadata": _metadata, "treespec_namedtuple_fields": _one_of({})},
        ),
        "opset_version": _map(_name, _int),
        "range_constraints": _map(_symbol, _record({"min_val": _optional(_int), "max_val": _optional(_int)})),
        "schema_version": _record({"major": _int, "minor": _int}),
        "verifiers": _list(_one_of("TRAINING", "ATEN")),
        "torch_version": _text(lambda text: text.startswith("2.13."), "2.13"),
        "guards_code": _list(_text(is_guard, "comparisons of the inputs' sizes: torch runs it as Python")),
    }
)
