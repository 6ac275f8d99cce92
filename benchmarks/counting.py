"""Counts what a CUDA GPU would do: kernels, bytes, waits and memory of any code, run on tensors
without data.

    with Counted() as cost, torch.inference_mode():
        network(torch.empty(4096, 3, 32, 32, device="meta"))
    print(sum(cost.kernels.values()), sum(cost.bytes.values()), cost.waits, cost.peak)

The code runs on torch's "meta" device, whose tensors have a shape and no values, so that nothing is
computed and the branches are those of an accelerator. Each operator that a GPU would execute counts
as one kernel, except where the tables below say how many eager PyTorch launches. No kernels are:
views, allocations, and copies between host and device. A kernel's bytes are those of the tensors
that it reads and writes, each once; of an expanded tensor those that it has in memory. What kernels
do inside (workspaces, layout changes within cuDNN, several passes of a reduction) is not counted. A
value that the host reads is 1 (or True): that is the branch that is counted.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
META = torch.device("meta")
# Operators without a kernel, beside views: they allocate, or only look at metadata.
_FREE = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten.lift_fresh,
}
# Operators that are sequences of kernels inside, where no mode sees them.
_SEVERAL = {aten.logsumexp: 9, aten.nonzero: 2}
# PyTorch's launches for lists of tensors (ATen/native/cuda/MultiTensorApply.cuh): so many tensors,
# by the number of lists, and so many blocks of so many elements.
_LIST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_LIST_BLOCKS, _LIST_ELEMENTS = 320, 65_536
_CONCATENATED = 128
_OVERWRITING = (
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "_foreach_copy_",
    "_foreach_zero_",
)


class Counted(TorchDispatchMode):
    """Within, operators on meta tensors are counted: ``kernels`` and ``bytes`` by operator,
    ``waits`` by reason.

    ``launches`` are those of the host, which takes one for all kernels of a graph: ``graphs`` has
    their numbers. ``peak`` is the most memory that tensors take at a time, in bytes: those made
    within, and those from before that were used. While ``paused``, operators run without being
    counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.peak, self._live, self._paused = 0, 0, False
        self.launches, self.graphs = 0, list[int]()
        self._storages: dict[int, weakref.ref[Any]] = {}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def launch(self, name: str, kernels: int, moved: int) -> None:
        """Count kernels that no operator stands for, for example of a library for exchange between
        GPUs.
        """
        if not self._paused:
            self.launches += kernels
            self.kernels[name] += kernels
            self.bytes[name] += moved

    def launch_graph(self, inside: Counted) -> None:
        """Count what was counted when a graph was recorded."""
        if not self._paused:
            self.launches += 1
            self.graphs.append(sum(inside.kernels.values()))
            self.peak = max(self.peak, inside.peak)
            for counts, of_graph in zip(
                (self.kernels, self.bytes, self.waits), (inside.kernels, inside.bytes, inside.waits)
            ):
                counts.update(of_graph)

    def wait(self, reason: str) -> None:
        """Count a point where the host waits for the device."""
        if not self._paused:
            self.waits[reason] += 1

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _consists_of_others(function):  # in inference mode they arrive whole
            with self:
                return function.decompose(*args, **kwargs)
        packet = function.overloadpacket
        if self._paused and packet not in _ANSWERS:
            return function(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._remember(given)
        if packet in _ANSWERS and any(tensor.is_meta for tensor in given):
            result = _ANSWERS[packet](self, args, kwargs)
        else:
            result = function(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self._remember(made)
        if not any(tensor.is_meta for tensor in (*given, *made)):
            return result  # work of the host
        name = packet.__name__
        self._note_waits(name, args, kwargs, given, made)
        if not (_is_view(function) or packet in _FREE or _crosses(given, made)):
            in_place = (
                name.startswith("_foreach_") and not made
            )  # of all lists, the first is overwritten
            moved = _moved(name, given, args[0] if in_place else made)
            if packet is aten.convolution and args[2] is not None:
                moved += 2 * made[0].nbytes  # the bias is added in place
            self.launch(name, _launches(function, args), moved)
        return result

    def _note_waits(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[torch.Tensor],
        made: list[torch.Tensor],
    ) -> None:
        if (
            name == "_to_copy"
            and not given[0].is_meta
            and made[0].is_meta
            and not kwargs.get("non_blocking")
        ):
            self.wait("copy to the device")
        elif name == "lift_fresh" and made[0].is_meta:
            self.wait("copy to the device")  # torch.tensor(values, device=...)
        elif name == "where" and any(not tensor.is_meta for tensor in given):
            self.wait(
                "copy to the device"
            )  # CUDA's where moves a number of the host to the device first
        elif (
            name == "fill_"
            and not given[0].dim()
            and given[0].untyped_storage().nbytes() > given[0].nbytes
        ):
            self.wait(
                "copy to the device"
            )  # tensor[index] = number, which CUDA copies from a tensor of the host
        elif name in ("index", "index_put_"):
            for index in args[1]:
                if isinstance(index, torch.Tensor) and not index.is_meta:
                    self.wait("copy to the device")
                elif _is_mask(index) and (
                    name == "index" or args[2].numel() > 1
                ):  # one value fills without a wait
                    self.wait("indexing by a mask")

    def _remember(self, tensors: list[torch.Tensor]) -> None:
        """Add the memory of tensors that were not seen before, until they are gone."""
        for tensor in tensors:
            if not tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            known = self._storages.get(key)
            if known is not None and known() is not None:
                continue
            self._storages[key] = weakref.ref(storage, self._forgetting(key, size))
            self._live += size
            self.peak = max(self.peak, self._live)

    def _forgetting(self, key: int, size: int) -> Callable[[Any], None]:
        def forget(reference: Any) -> None:
            self._live -= size
            if self._storages.get(key) is reference:
                del self._storages[key]

        return forget


def _answer_number(counted: Counted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    counted.wait("value read by the host")
    return True if args[0].dtype == torch.bool else args[0].dtype.is_floating_point and 1.0 or 1


def _answer_copy(counted: Counted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A tensor on the host is a zero; on the device, what the operator itself returns."""
    device = torch.device(kwargs.get("device") or META)
    if args[0].is_meta and device.type == "cpu":
        if not kwargs.get("non_blocking"):
            counted.wait("copy to the host")
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    return aten._to_copy.default(*args, **kwargs)


def _answer_copy_into(
    counted: Counted, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    target, source, *rest = args
    if target.is_meta == source.is_meta:
        return aten.copy_.default(*args, **kwargs)
    if not (kwargs.get("non_blocking") or rest and rest[0]):
        counted.wait("copy to the device" if target.is_meta else "copy to the host")
    return target


def _answer_nonzero(
    counted: Counted, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """All entries: the most rows that there can be."""
    counted.wait("number of nonzero entries")
    return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device=META)


def _answer_index(counted: Counted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """All entries of a mask: the most rows that there can be."""
    places: list[torch.Tensor | None] = []
    for index in args[1]:
        every = (
            torch.empty(index.numel(), dtype=torch.int64, device=META) if _is_mask(index) else index
        )
        places += [every] * (index.dim() if _is_mask(index) else 1)
    return aten.index.Tensor(args[0], places)


def _answer_fused(counted: Counted, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A convolution with all that follows in the same kernel, which the meta device does not
    know.
    """
    stride, padding, dilation, groups = args[-4:]
    return aten.convolution.default(
        args[0], args[1], None, stride, padding, dilation, False, [0, 0], groups
    )


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


_ANSWERS: dict[Any, Callable[[Counted, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten._local_scalar_dense: _answer_number,
    aten._to_copy: _answer_copy,
    aten.copy_: _answer_copy_into,
    aten.nonzero: _answer_nonzero,
    aten.index: _answer_index,
    aten.cudnn_convolution_relu: _answer_fused,
    aten.cudnn_convolution_add_relu: _answer_fused,
}


@functools.cache
def _consists_of_others(function: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        function.name(), "CompositeImplicitAutograd"
    )


@functools.cache
def _is_view(function: Any) -> bool:
    returned = function._schema.returns
    return bool(returned) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in returned
    )


def _crosses(given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Whether an operator copies between host and device, gives the host a number, or has nothing
    to compute.
    """
    if not all(tensor.is_meta for tensor in made) or (len(given) == 1 and not given[0].is_meta):
        return True
    written = made or given[:1]
    return not any(tensor.numel() for tensor in written)


def _launches(function: Any, args: tuple[Any, ...]) -> int:
    """The kernels of an operator."""
    packet, name = function.overloadpacket, function.overloadpacket.__name__
    if packet is aten.convolution:
        return 1 + (
            args[2] is not None
        )  # cuDNN's convolution has no bias: PyTorch adds it in place
    if packet is aten.convolution_backward:
        return sum(args[-1])  # of input, weight and bias
    if packet in (aten.cat, aten.stack):
        return math.ceil(len(args[0]) / _CONCATENATED)
    if name.startswith("_foreach_"):
        lists = [
            arg
            for arg in args
            if isinstance(arg, (list, tuple)) and isinstance(arg[0], torch.Tensor)
        ]
        return _list_launches(lists, function._schema.returns)
    return _SEVERAL.get(packet, 1)


def _list_launches(lists: list[list[torch.Tensor]], returned: Any) -> int:
    """The launches for lists of tensors: few, or one for each tensor where shapes, layouts or
    devices differ.
    """
    for tensors in zip(*lists):
        first = tensors[0]
        if any(
            tensor.shape != first.shape
            or tensor.stride() != first.stride()
            or not _is_dense(tensor)
            for tensor in tensors
        ):
            return len(lists[0])
    depth = len(lists) + bool(returned)  # results in new tensors are one more list
    launches = tensors_held = blocks = 0
    for tensor in lists[0]:
        waiting = math.ceil(tensor.numel() / _LIST_ELEMENTS)
        tensors_held += 1
        while waiting:
            taken = min(waiting, _LIST_BLOCKS - blocks)
            waiting, blocks = waiting - taken, blocks + taken
            if blocks == _LIST_BLOCKS:
                launches, blocks, tensors_held = launches + 1, 0, int(waiting > 0)
        if tensors_held == _LIST_TENSORS[depth]:
            launches, blocks, tensors_held = launches + 1, 0, 0
    return launches + (blocks > 0)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a piece of memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _moved(name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    read = given[1:] if name in _OVERWRITING else given
    return sum(_in_memory(tensor) for tensor in (*read, *made) if tensor.is_meta)


def _in_memory(tensor: torch.Tensor) -> int:
    """The bytes of a tensor, without the repetitions of an expanded one."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride()) if stride]
    return math.prod(sizes) * tensor.element_size() if tensor.numel() else 0


def page(rows: list[dict], with_operators: bool) -> str:
    """The figures as Markdown."""
    lines = [
        "| case | images | kernels | launches | MB per image | waits | peak GiB | bytes, ms | "
        "launches, ms |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        moved, waits = row["bytes"] / row["images"] / 1e6, sum(row["waits"].values())
        lines.append(
            f"| {row['case']} | {row['images']} | {row['kernels']:,} | {row['launches']:,} | "
            f"{moved:,.2f} | {waits} | {row['peak'] / 2**30:.2f} | {row['bytes_ms']:.1f} | "
            f"{row['launches_ms']:.1f} |"
        )
    for row in rows if with_operators else ():
        lines += [
            "",
            f"{row['case']}; waits: {row['waits'] or 'none'}",
            "",
            "| operator | kernels | MB per image |",
        ]
        lines.append("|---|---:|---:|")
        for name, found in row["operators"].items():
            lines.append(
                f"| {name} | {found['kernels']:,} | {found['bytes'] / row['images'] / 1e6:,.3f} |"
            )
    return "\n".join(lines)
