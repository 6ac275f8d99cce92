"""A device that is not the CPU, for machines without a GPU: "standin", which the CPU computes.

It refuses what a GPU refuses: tensors of two devices in one operation, random numbers by a
generator of another device, and conversion to NumPy. As on a GPU, generators yield other numbers
than the CPU's, and a division by a number is a product with its rounded inverse. It has no streams,
graphs or kernels of its own. PyTorch lets Python define such a device from version 2.10 on.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils import _device, backend_registration

NAME = "standin"
IS_POSSIBLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
# Seeds of the device's generators begin with these bits, by which they are known.
_SEED_BITS, _SEED = 48, 0x5EED
# PyTorch does not make these through the device's own functions.
_MADE_ON_THE_CPU = ("tensor", "as_tensor")
_CPU = torch.device("cpu")
_aten = torch.ops.aten
# These take tensors of several devices; those of indexing, indices that are on the CPU.
_COPIES = {_aten.copy_, _aten._to_copy, _aten._copy_from, _aten._foreach_copy_}
_INDEXING = {_aten.index, _aten._unsafe_index, _aten.index_put, _aten.index_put_}
_INDEXING |= {_aten._index_put_impl_}
_PRODUCTS = {_aten.div.Tensor: _aten.mul.Tensor, _aten.div_.Tensor: _aten.mul_.Tensor}
_LIBRARY, _ATEN = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
# These would be made empty and then resized.
_MADE_WHOLE = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_MADE_WHOLE += (_aten.eye.default, _aten.eye.m)
# What torch.autocast computes in low precision, of what networks here have.
_IN_LOW_PRECISION = ("conv2d", "linear", "matmul")


class StandInTensor(torch.Tensor):
    """A tensor on the device. Its values are in ``inner``, a tensor of the CPU."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "StandInTensor":
        outer = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(NAME, 0),
        )
        outer.inner = inner
        return outer

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(function, *args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            other: torch.Tensor = StandInTensor(self.inner.detach().clone())
            if isinstance(self, torch.nn.Parameter):
                other = torch.nn.Parameter(other, self.requires_grad)
            memo[id(self)] = other
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.inner.detach().__reduce_ex__(protocol)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_as_index(index))

    def __setitem__(self, index: Any, values: Any) -> None:
        super().__setitem__(_as_index(index), values)

    def numpy(self, **how: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self, **how: Any) -> str:
        return f"{self.inner}, device='{self.device}'"


class _Generator(torch.Generator):
    """A generator of PyTorch's; that of the device yields other numbers than the CPU's."""

    _is_there: bool

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        is_there = torch.device(device).type == NAME
        made = super().__new__(cls, _CPU if is_there else device)
        made._is_there = is_there
        return made

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0) if self._is_there else super().device

    def manual_seed(self, seed: int) -> torch.Generator:
        if not self._is_there:
            return super().manual_seed(seed)
        super().manual_seed(_SEED << _SEED_BITS | (seed ^ _SEED) % 2**_SEED_BITS)
        return self


class _Backend(
    backend_registration._DummyBackendModule if IS_POSSIBLE else object  # type: ignore[misc]
):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


def install(put: Callable[[object, str, object], None] = setattr) -> torch.device:
    """Make the device usable as any other; ``put`` sets attributes of torch."""
    _device._device_constructors()  # remembers these functions as they are
    if torch.Generator is not _Generator:
        put(torch, "Generator", _Generator)
        for name in _MADE_ON_THE_CPU:
            put(torch, name, _moved(getattr(torch, name)))
    return torch.device(NAME)


def become_the_default(name: str, put: Callable[[object, str, object], None] = setattr) -> None:
    """Let commands and functions of this process compute on the device, unless told otherwise."""
    from smoothadv.base import devices

    if name == NAME and not IS_POSSIBLE:
        return
    device = install(put) if name == NAME else torch.device(name)
    put(devices, "default_device", lambda: device)


def _cast(function: Any, *args: Any) -> torch.Tensor:
    """What a function returns within torch.autocast."""
    dtype = torch.get_autocast_dtype(NAME)
    with torch.autocast(NAME, enabled=False):
        is_float = [isinstance(each, torch.Tensor) and each.is_floating_point() for each in args]
        return function(*[each.to(dtype) if is_so else each for each, is_so in zip(args, is_float)])


def _moved(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*values: Any, device: Any = None, **how: Any) -> torch.Tensor:
        is_there = device is not None and torch.device(device).type == NAME
        on_cpu = make(*values, device="cpu" if is_there else device, **how)
        return on_cpu.to(device) if is_there else on_cpu

    return made


def _computed(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What a function of PyTorch returns, computed on the CPU as if on the device."""
    target, packet = kwargs.get("device"), function.overloadpacket
    leaves = list(_leaves((*args, *kwargs.values())))
    outer = {id(each.inner): each for each in leaves if isinstance(each, StandInTensor)}
    _check(function, outer, _leaves((args[0], *args[2:])) if packet in _INDEXING else leaves)
    inputs, named = _inner(args), {name: _inner(value) for name, value in kwargs.items()}
    if target is not None:
        named["device"] = _CPU
    if function in _PRODUCTS and isinstance(args[0], StandInTensor) and _is_number(args[1]):
        one = torch.ones((), dtype=torch.promote_types(inputs[0].dtype, torch.float32))
        function, inputs = _PRODUCTS[function], (inputs[0], (one / inputs[1]).item())
    result = function(*inputs, **named)
    if target is not None and torch.device(target).type != NAME:
        return result
    return _outer(result, outer)


def _check(function: Any, outer: dict[int, Any], values: Iterable[Any]) -> None:
    """RuntimeError where a GPU would refuse these values beside the tensors in ``outer``."""
    for value in values:
        if isinstance(value, torch._C.Generator) and value.initial_seed() >> _SEED_BITS != _SEED:
            raise RuntimeError(f"Expected a {NAME!r} generator, but found another ({function})")
        is_elsewhere = isinstance(value, torch.Tensor) and value.device.type != NAME
        if is_elsewhere and value.dim() and outer and function.overloadpacket not in _COPIES:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{NAME}:0 and {value.device}! ({function})"
            )


def _as_index(index: Any) -> Any:
    """The index with lists and arrays as tensors, which PyTorch does not make for this device."""
    if isinstance(index, tuple):
        return tuple(map(_as_index, index))
    return torch.as_tensor(index) if isinstance(index, (list, np.ndarray)) else index


def _is_number(value: Any) -> bool:
    return not isinstance(value, StandInTensor) and not getattr(value, "shape", ())


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        else:
            yield value


def _inner(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_inner, value))
    return value.inner if isinstance(value, StandInTensor) else value


def _outer(value: Any, known: dict[int, StandInTensor]) -> Any:
    """The result on the device; what an operation changed in place is the tensor that it got."""
    if isinstance(value, (list, tuple)):
        return type(value)([_outer(each, known) for each in value])
    if not isinstance(value, torch.Tensor):
        return value
    before = known.get(id(value))
    if before is None:
        with torch.inference_mode(value.is_inference()):  # a view is one where its base is
            return StandInTensor(value)
    assert before.shape == value.shape, "the device cannot change a shape in place"
    return before


def _register() -> None:
    """Make the device known to this process: before the first gradient, as PyTorch asks."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Backend())
    _LIBRARY.fallback(_computed, "PrivateUse1")
    _LIBRARY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for function in _MADE_WHOLE:
        _ATEN.impl(function, partial(_computed, function), "PrivateUse1")
    for name in _IN_LOW_PRECISION:
        _ATEN.impl(name, partial(_cast, getattr(_aten, name)), "AutocastPrivateUse1")


if IS_POSSIBLE:
    _register()
