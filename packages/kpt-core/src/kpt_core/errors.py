"""Every error and warning that KPT raises, in one hierarchy."""

import difflib
import gc
import sys
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_PACKAGE = __name__.partition(".")[0]
#: How the files begin whose frames lie between a caller and a warning: torch's, its graphs', what binds an op's call.
_BETWEEN = (str(Path(torch.__file__).parent), "<eval_with_key>", "<op ")


class KptError(Exception):
    """Base of every error that KPT raises on purpose."""


class InputError(KptError, ValueError):
    """An argument's shape, dtype, device or value is wrong; the message says what was expected."""


MOST_NAMES = 12  #: that a message lists


class UnknownNameError(KptError, LookupError):
    """A name (op, kernel, backend, preset, level) does not exist; the message offers the nearest ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        known = sorted(known, key=lambda name: (name.count("/") + name.count(":"), name))
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)  # users give None, too
        if near:
            offer = f"did you mean {' or '.join(repr(n) for n in near)}?"
        elif known:
            offer = f"known: {', '.join(known[:MOST_NAMES])}"
            offer += f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
        else:
            offer = f"no {kind} is installed"
        super().__init__(f"unknown {kind} {name!r}: {offer}{' ' + hint if hint else ''}")
        self.name = name
        self.nearest = near

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.args, self.__dict__)  # the message is made of other arguments


def _unpickled(kind: type[KptError], args: tuple[Any, ...], state: dict[str, Any]) -> KptError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class NoKernelError(KptError, RuntimeError):
    """What was asked for explicitly (`use`, `KPT_USE`, strict mode) cannot run; the message has every refusal."""


class RegistrationError(KptError):
    """Two things claim one name, or something registered is not what its group promises."""


class KptWarning(UserWarning):
    """Base of KPT's warnings."""


class PluginWarning(KptWarning):
    """A plug-in could not be used; the rest goes on without it."""


class KernelFailedWarning(KptWarning):
    """A kernel raised and the next one ran; after three failures it is off."""


class TuningWarning(KptWarning):
    """A tuning table, or part of one, is ignored; dispatch goes on without it."""


class FallbackWarning(KptWarning):
    """An accelerator runs plain PyTorch because no kernel of a vendor accepted the call."""


def describe_error(error: BaseException) -> str:
    """Return an error's type and text, as a clause."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line outside this package, and torch, that called it, however deep the call lies."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _lies_between(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


class SwitchWatch:
    """A forward pre-hook that warns once where its module's config no longer says what it said; may be lost."""

    def __init__(self, attribute: str, name: str) -> None:
        self.attribute, self.name, self.told = attribute, name, False

    def __call__(self, module: Any, args: Any) -> None:
        """Look at the module's config; of what another model did, warn."""
        if torch.compiler.is_compiling() or self.told:
            return
        now = getattr(module.config, self.attribute, None)
        if now == self.name:
            return
        self.told = True
        models = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)
                  and hasattr(type(each), "from_pretrained")]  # fmt: skip
        holders = [each for each in models if each.__dict__.get("config") is module.config]
        own = {each for holder in holders if module in (inside := set(holder.modules())) for each in inside}
        others = [each for each in holders if each not in own]
        for each in own:
            for hook in each._forward_pre_hooks.values():
                if isinstance(hook, SwitchWatch) and hook.attribute == self.attribute:
                    hook.told = True
        if others:
            warn_caller(
                f"{type(module).__name__} is no longer served by KPT: its config's {self.attribute} was {self.name!r} "
                f"and is {now!r}, and {type(others[0]).__name__} has the same config, which transformers keeps for all "
                "models that are made from it: give each model a copy.deepcopy(config)",
                KptWarning,
            )


#: By the identity of a config and the attribute: the config, and the layer whose modules watch it for all.
_watched: dict[tuple[int, str], tuple[weakref.ref[Any], Any]] = {}


def warn_of_switch(module: torch.nn.Module, attribute: str, name: str) -> None:
    """Let a Hugging Face module that KPT serves warn, once, where another model switches it off by their common config.

    Of the layers of a model one looks: a hook takes a module off torch's short way, which decoding would feel.

    Args:
        module: has a `config`.
        attribute: of the config, which says by whom the module is served, as `_attn_implementation`.
        name: KPT's name there.
    """
    if torch.compiler.is_compiling():
        return
    config = getattr(module, "config", None)
    kept, layer = _watched.get((id(config), attribute), (None, None)), getattr(module, "layer_idx", None)
    if layer is not None and kept[0] is not None and kept[0]() is config and kept[1] != layer:
        return
    watches = (each for each in module._forward_pre_hooks.values() if type(each) is SwitchWatch)
    known = next((each for each in watches if each.attribute == attribute), None)
    if known is not None and not known.told:  # each call comes by here, and to read a config takes microseconds
        return
    if getattr(config, attribute, None) != name:
        return
    if known is not None:
        known.told = False
        return
    module.register_forward_pre_hook(SwitchWatch(attribute, name))
    if layer is not None:
        key = id(config), attribute
        _watched[key] = weakref.ref(config, lambda _: _watched.pop(key, None)), layer


def _lies_between(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package == _PACKAGE or frame.f_code.co_filename.startswith(_BETWEEN)
