"""Modules of a model replaced by others."""

from collections.abc import Callable, Iterable

from torch import nn


def replace_modules(model: nn.Module, paths: Iterable[str], make: Callable[[str, nn.Module], nn.Module]) -> nn.Module:
    """Put what is made of the modules at `paths` in their place; of a module at several paths one is made.

    Returns:
        `model`, or what takes its place if its own path `""` is among `paths`.
    """
    made: dict[nn.Module, nn.Module] = {}
    for path, module in [(path, model.get_submodule(path)) for path in paths]:
        if module not in made:
            made[module] = make(path, module)
        if not path:
            return made[module]
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = made[module]
    return model
