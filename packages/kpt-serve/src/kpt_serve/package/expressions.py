"""What a program's symbolic sizes and guards may say: `torch.export.load` evaluates them as Python."""

import ast
import re

#: What torch writes of a size: constructors of SymPy and functions of its own. SymPy has others that evaluate strings.
_FUNCTION = re.compile(
    r"Add|And|BitwiseFn_bitwise_(and|or|xor)|CeilDiv|CeilToInt|CleanDiv|Equality|FloatTrueDiv|FloorDiv|FloorToInt|"
    r"GreaterThan|Identity|IntTrueDiv|IsNonOverlappingAndDenseIndicator|LessThan|Max|Min|Mod|ModularIndexing|Mul|Not|"
    r"OpaqueUnaryFn_(a?cos|cosh|a?sinh?|a?tan|tanh|exp|log2?|sqrt)|Or|PythonMod|RoundDecimal|RoundToInt|"
    r"StrictGreaterThan|StrictLessThan|ToFloat|TruncToFloat|TruncToInt|Unequality|Where"
)
_POWERS = ("Pow", "PowByNatural", "FloatPow")
#: Powers of numbers are computed: more, or larger ones, would take this machine's memory.
_MOST_POWERS, _LARGEST_POWER = 4, 16
_SYMBOL = re.compile(r"[a-z]{1,4}\d+")
_NUMBER = re.compile(r"-?\d{1,40}(\.\d{0,40})?(e[-+]?\d{1,3})?")
_GUARD = re.compile(r"[\w .,:()\[\]'+\-*/%<>=!&|^~]*")
_GUARD_FUNCTIONS = frozenset(("max", "min", "abs", "round", "Max", "Min", "FloorDiv", "Mod", "PythonMod", "CleanDiv"))
_GUARD_METHODS = frozenset(("size", "stride", "storage_offset"))
_LONGEST = 4096


def is_symbol(text: str) -> bool:
    """Return whether a text is a name that torch gives a dynamic size, as `s77`."""
    return _SYMBOL.fullmatch(text) is not None


def is_size(text: str) -> bool:
    """Return whether a symbolic size is made of names, numbers, arithmetic and calls of known functions alone."""
    node = _parsed(text)
    if node is None or sum(text.count(power) for power in _POWERS) > _MOST_POWERS:
        return False
    return _is_size(node)


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body if len(text) <= _LONGEST else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_size(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return value is None or isinstance(value, bool | int | float)
        case ast.Name(id=name):
            return is_symbol(name) or name in ("true", "false")
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _is_size(operand)
        case ast.BinOp(
            left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Mod(), right=right
        ):
            return _is_size(left) and _is_size(right)
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(name))], keywords=facts):
            return is_symbol(name) and all(fact.arg and _is_flag(fact.value) for fact in facts)
        case ast.Call(func=ast.Name(id="Float"), args=[ast.Constant(value=str(number))], keywords=facts):
            return _NUMBER.fullmatch(number) is not None and all(_is_precision(fact) for fact in facts)
        case ast.Call(func=ast.Name(id="Integer" | "Rational"), args=numbers, keywords=[]):
            return all(_number(number) is not None for number in numbers)
        case ast.Call(func=ast.Name(id="Pow" | "PowByNatural" | "FloatPow"), args=[base, power], keywords=[]):
            exponent = _number(power)
            return _is_size(base) and exponent is not None and abs(exponent) <= _LARGEST_POWER
        case ast.Call(func=ast.Name(id=name), args=values, keywords=[]):
            return _FUNCTION.fullmatch(name) is not None and all(_is_size(value) for value in values)
    return False


def _is_flag(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _is_precision(fact: ast.keyword) -> bool:
    number = _number(fact.value)
    return fact.arg == "precision" and number is not None and 0 < number <= 1000


def _number(node: ast.expr) -> float | None:
    """Return the number that an expression writes down, without computing one."""
    match node:
        case ast.Constant(value=int(value)) | ast.Constant(value=float(value)) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = _number(operand)
            return None if number is None else -number
        case ast.Call(func=ast.Name(id="Integer"), args=[value], keywords=[]):
            return _number(value)
        case ast.Call(func=ast.Name(id="Float"), args=[ast.Constant(value=str(text))]) if _NUMBER.fullmatch(text):
            return float(text)
        case ast.Call(func=ast.Name(id="Rational"), args=[above, below], keywords=[]):
            one, other = _number(above), _number(below)
            return one / other if one is not None and other else None
    return None


def is_guard(text: str) -> bool:
    """Return whether a guard compares sizes of inputs, as `L['x'].size()[0] // 2 <= 8`, and does nothing else."""
    node = _parsed(text) if _GUARD.fullmatch(text) else None
    return node is not None and all(_in_guard(each) for each in ast.walk(node))


def _in_guard(node: ast.AST) -> bool:
    match node:
        case ast.BinOp(op=ast.Pow() | ast.LShift() | ast.MatMult()):
            return False
        case ast.Constant(value=value):
            return isinstance(value, bool | int | float | str)
        case ast.Name(id=name):
            return name == "L" or name in _GUARD_FUNCTIONS
        case ast.Attribute(attr=name):
            return name in _GUARD_METHODS
        case ast.Call(func=ast.Name() | ast.Attribute(), keywords=[]):
            return True
    kinds = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Subscript)
    return isinstance(node, (*kinds, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context))
