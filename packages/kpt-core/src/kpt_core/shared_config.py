"""Watching a config that several models share: one of them may switch off what serves another."""

import gc
import weakref
from typing import Any

import torch
from torch import nn

from .errors import KptWarning, warn_caller


class SwitchWatch:
    """A forward pre-hook that warns once where its module's config no longer says what it said.

    A pickled module takes none along, and so needs no KPT: a hook that gives arguments back stands for it.
    """

    def __init__(self, attribute: str, name: str) -> None:
        self.attribute, self.name, self.told = attribute, name, False

    def __reduce__(self) -> tuple[Any, ...]:
        """Give `{}.pop`, which finds no module and returns its default, the arguments."""
        return getattr, ({}, "pop")

    def __deepcopy__(self, memo: dict[int, Any]) -> "SwitchWatch":
        return SwitchWatch(self.attribute, self.name)

    def __call__(self, module: Any, args: Any) -> None:
        """Look at the module's config; of what another model did, warn."""
        if torch.compiler.is_compiling() or self.told:
            return
        now = getattr(module.config, self.attribute, None)
        if now == self.name:
            return
        self.told = True
        modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        holders = [each for each in modules if each.__dict__.get("config") is module.config]
        parts = {each for holder in holders for each in holder.modules() if each is not holder}
        models = [each for each in holders if each not in parts]
        own = {each for model in models if module in (inside := set(model.modules())) for each in inside}
        others = [each for each in models if each not in own]
        for each in own:
            for hook in each._forward_pre_hooks.values():
                if isinstance(hook, SwitchWatch) and hook.attribute == self.attribute:
                    hook.told = True
        if others:
            warn_caller(
                f"{type(module).__name__} is no longer served by KPT: its config's {self.attribute} was {self.name!r} "
                f"and is {now!r}, and {type(others[0]).__name__} has the same config, as all models made from one "
                "do: give each model a copy.deepcopy(config)",
                KptWarning,
            )


#: By the identity of a config and the attribute: the config, and the layer whose modules watch it for all.
_watched: dict[tuple[int, str], tuple[weakref.ref[Any], Any]] = {}


def warn_of_switch(module: nn.Module, attribute: str, name: str, layer: object = None) -> None:
    """Let a module that KPT serves warn, once, where another model switches it off by their common config.

    Of the layers of a model one looks: a hook takes a module off torch's short way, which decoding would feel.

    Args:
        module: has a `config`.
        attribute: of the config, which says by whom the module is served, as `_attn_implementation`.
        name: KPT's name there.
        layer: of the model, whose modules look for those of all others; None: each looks for itself.
    """
    if torch.compiler.is_compiling():
        return
    config = getattr(module, "config", None)
    kept = _watched.get((id(config), attribute), (None, None))
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
