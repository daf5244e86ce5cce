"""What is compiled ahead of time to prove the kernels on chips that are not here (see kpt-conformance's `aot`)."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

#: Shape and dtype of each array, as in `("bfloat16", 8, 128)`, None for one that is left out; and what is static.
Arguments = tuple[tuple[tuple[Any, ...] | None, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A function of `kpt_backend_tpu.pallas` for arguments of certain sizes.

    Attributes:
        name: tells the programs of a kernel apart.
        function: `module:function` there.
        sizes: of each configuration, by its name.
        arguments: what a configuration's sizes make of arguments.
        contracts: of each chip, by its name.
    """

    name: str
    function: str
    sizes: Mapping[str, Mapping[str, Any]]
    arguments: Callable[..., Arguments]
    contracts: Mapping[str, str]

    def configurations(self, chip: str) -> Mapping[str, Mapping[str, Any]]:
        """Return the sizes that it is compiled for: tiles follow from them."""
        return self.sizes

    def lower(self, devices: Sequence[Any], configuration: Mapping[str, Any]) -> Any:
        """Return what JAX lowers for one of these devices."""
        import jax

        arrays, static = self.arguments(**configuration)
        place = jax.sharding.SingleDeviceSharding(devices[0])
        module, _, name = self.function.partition(":")
        function = getattr(importlib.import_module(f"kpt_backend_tpu.pallas.{module}"), name)
        array: Any = jax.ShapeDtypeStruct
        given = [each and array(each[1:], each[0], sharding=place) for each in arrays]
        return jax.jit(partial(function, **static, interpret=False)).lower(*given)
