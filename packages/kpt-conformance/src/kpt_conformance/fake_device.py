"""A device written in Python: it computes on the CPU and refuses to mix with CPU tensors, as an accelerator does.

What a layer or an op leaves behind on the CPU (a buffer that was not registered, a factory call without `device=`) is
an error here that names the operation and both devices, on a machine without any accelerator. There are two devices,
`kptfake:0` and `kptfake:1`, which don't mix with each other either; `kptfake` is `kptfake:0`.

Its tensors are plain `torch.Tensor`s of torch's device type for out-of-tree backends, renamed, over memory that DLPack
hands over: a tensor of the CPU whose label says another device. So everything that torch decides by dispatch (composite
ops, views, autograd, autocast, an op's kernels by device) is decided as on a real accelerator, which a tensor subclass
would not give: subclasses are dispatched before their device is looked at. Ops that torch implements for each device
on its own run on the CPU's view of the same memory. An op of a library other than torch's own needs a kernel
for every device (`CompositeExplicitAutograd`) or for this one: one for the CPU alone is refused.

What it cannot do:
    - Backward runs in the thread that asks for it, which needs to have called `enable()`: torch makes the threads of
      accelerators at a process's first backward, which may have been before.
    - An error of a hook on a tensor arrives as a `SystemError` of backward; the hook's own is printed.
    - It has no streams, no generators (random numbers are the CPU's) and no convolutions.

Enabling it lasts for the process: torch has room for one such device type, and `torch.accelerator` is it from then on.
"""

import ctypes
import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "kptfake"
COUNT = 2

_enabled: list[torch.library.Library] = []
_CPU = torch.device("cpu")
#: DLPack's numbers of the CPU and of a device type that the standard doesn't know, torch's `PrivateUse1`.
_DLPACK_CPU, _DLPACK_EXTENSION = 1, 12
_AS_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
#: None before torch 2.9, where kernels are tried all the same: only references and layers are put on this device.
_ACCELERATOR: Any = getattr(torch._C, "_acc", None)


def enable() -> torch.device:
    """Make the device type `kptfake` known to torch, let this thread go backward on it, and return the first device.

    It may be called again, and has to be in another thread that goes backward. It raises `RuntimeError` if the process
    has another out-of-tree device type already.
    """
    if not _enabled:
        _register()
    torch.autograd.set_multithreading_enabled(False)
    return torch.device(NAME, 0)


def _register() -> None:
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise RuntimeError(
            f"the fake device cannot be made: torch has room for one out-of-tree device type, and this process has "
            f"{taken!r}; use a process of its own"
        )
    if _ACCELERATOR is None:
        raise RuntimeError(f"the fake device cannot be made: it needs torch 2.9, and this is {torch.__version__}")
    # Here, since the module is not part of torch's public interface: importing this file must work without it.
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=_DeviceModule(), device_guard=_DeviceGuard())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_run, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    # Torch would serve these by their out= variants, whose complaint of two devices doesn't say which op was called.
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutogradNonFunctional"):
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(op, functools.partial(_run, op), "PrivateUse1")
    _enabled.extend((every, aten))
    _let_storages_be_made()
    _let_synchronize_return()


class _DeviceGuard(_ACCELERATOR.DeviceGuard if _ACCELERATOR else object):  # type: ignore[misc]
    """How torch switches devices: not at all, there is one type of them."""

    def type_(self) -> Any:
        """The device type.

        Torch asks while an error of a tensor's hook is on its way through autograd. Python would end the process
        for a call that returns with an error pending.
        """
        try:
            _raise_pending()
        except BaseException as error:
            traceback.print_exception(error)  # nobody else will: backward then raises a SystemError without it
        return torch._C._autograd.DeviceType.PrivateUse1


#: Raises the error that is pending in this thread, if one is: what `ctypes` does after each call into Python itself.
_raise_pending = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyErr_Occurred", ctypes.pythonapi))


class _DeviceModule:
    """What `torch.get_device_module("kptfake")` and `torch.kptfake` are."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: object = None) -> None:
        """There is nothing to wait for."""

    def device(self, device: object) -> AbstractContextManager[None]:
        return nullcontext()

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Nothing: `torch.manual_seed` calls it and has seeded the CPU's generator, which is this device's."""

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False


class _DLTensorHead(ctypes.Structure):
    """How a `DLManagedTensor` begins."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _labelled(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the same memory, strides and dtype as a tensor on another device; keeps the memory alive."""
    capsule = torch._C._to_dlpack(tensor)
    head = ctypes.cast(_pointer_of(capsule, b"dltensor"), ctypes.POINTER(_DLTensorHead)).contents
    head.device_type = _DLPACK_CPU if device.type == "cpu" else _DLPACK_EXTENSION
    head.device_id = device.index or 0
    return torch.utils.dlpack.from_dlpack(capsule)


def _run(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Any op that has no kernel for the device: run the CPU's on the same memory."""
    if op.namespace not in ("aten", "prims"):
        raise NotImplementedError(
            f"{op} has no kernel for the device type {NAME}, as it has none for accelerators; register one for "
            "CompositeExplicitAutograd, or don't call it there"
        )
    if op.is_view or op.overloadpacket is torch.ops.aten.set_:
        # The CPU's kernel looks at sizes, strides and storage alone, and so gives a tensor of this device that shares
        # the storage: what autograd supposes of a view.
        return op.redispatch(_AS_CPU, *args, **kwargs)
    device = _device_of(op, args, kwargs)
    twins: dict[int, tuple[Tensor, Tensor]] = {}  # by the tensor's id, so that one given twice has one twin

    def twin(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        if id(tensor) not in twins:
            empty = tensor.numel() == 0  # as out=, it may be resized, which memory from DLPack can't be
            layout = tensor.shape, tensor.stride()
            made = torch.empty_strided(*layout, dtype=tensor.dtype) if empty else _labelled(tensor, _CPU)
            twins[id(tensor)] = tensor, made
        return twins[id(tensor)][1]

    args, kwargs = tree_map_only(Tensor, twin, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = _CPU
    before = [(twin.shape, twin.stride()) for _, twin in twins.values()]
    # A number that torch made a tensor of arrives as a number again: its own overload takes it.
    numbers = any(
        isinstance(given, int | float | complex) and isinstance(argument.type, torch.TensorType)
        for given, argument in zip(args, op._schema.arguments, strict=False)
    )
    result = (op.overloadpacket if numbers else op)(*args, **kwargs)
    for (tensor, changed), known in zip(twins.values(), before, strict=True):
        if (changed.shape, changed.stride()) != known:
            tensor.data = _labelled(changed, device)
    given = {id(twin): tensor for tensor, twin in twins.values()}

    def on_device(out: Tensor) -> Tensor:
        # In-place and out= ops give back the very tensors that they were given.
        return given[id(out)] if id(out) in given else _labelled(out, device)

    return tree_map_only(Tensor, on_device, result)


def _device_of(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Return the one device of a call, or raise `RuntimeError` if there are two, or a generator of the CPU."""
    asked: Any = kwargs.get("device")
    tensors = list(_named_tensors(op, args, kwargs))
    on_device = [tensor.device for _, _, tensor in tensors if tensor.device.type == NAME]
    device = on_device[0] if on_device else torch.device(asked)
    for name, written, tensor in tensors:
        if tensor.device == device or (tensor.device.type == "cpu" and tensor.dim() == 0 and not written):
            continue
        shown = ", ".join(f"{name} {list(tensor.shape)} on {tensor.device}" for name, _, tensor in tensors)
        raise RuntimeError(
            f"{op}: expected every tensor on one device, but found {device} and {tensor.device} ({shown}); only a "
            "tensor of no dimensions may be on the CPU. Was it made without device=, or left behind by .to()?"
        )
    if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
        raise RuntimeError(f"{op}: expected no generator or one of {device}, but found one of the CPU")
    return device if asked is None or not on_device else torch.device(asked)


def _named_tensors(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, bool, Tensor]]:
    """Yield each tensor of a call with its parameter's name and whether the op writes it."""
    for position, parameter in enumerate(op._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(parameter.name)
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield parameter.name, parameter.alias_info is not None and parameter.alias_info.is_write, leaf


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """What torch's `copy_` and `.to` come down to: the one op that may see two devices."""
    source, memory = (t if t.device.type == "cpu" else _labelled(t, _CPU) for t in (source, target))
    memory.copy_(source)
    return target


def _let_storages_be_made() -> None:
    """Let `torch.UntypedStorage(size, device="kptfake")` work, for `deepcopy` and `torch.load`.

    torch asks the device's allocator, which only C++ can register, and crashes without one.
    """
    of_torch: Callable[..., torch.UntypedStorage] = torch.UntypedStorage.__new__

    def new(cls: type[torch.UntypedStorage], *args: Any, **kwargs: Any) -> torch.UntypedStorage:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != NAME:
            return of_torch(cls, *args, **kwargs)
        size = args[0] if args else 0
        return _labelled(torch.empty(size, dtype=torch.uint8), torch.device(device)).untyped_storage()

    torch.UntypedStorage.__new__ = staticmethod(new)  # type: ignore[method-assign, assignment]


def _let_synchronize_return() -> None:
    """Let `torch.accelerator.synchronize` work, which torch's device guard for Python backends refuses."""
    of_torch = torch.accelerator.synchronize

    @functools.wraps(of_torch)
    def synchronize(device: Any = None, /) -> None:
        asked = torch.device(device) if isinstance(device, str | torch.device) else None
        if (asked or torch.accelerator.current_accelerator() or _CPU).type != NAME:
            of_torch(device)

    torch.accelerator.synchronize = synchronize
