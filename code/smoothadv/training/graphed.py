"""Updates as CUDA graphs: the kernels of an update, recorded once, are launched together, without the host's delays.

A graph repeats what was recorded: the same kernels on the same memory. All that changes from update to update is in
tensors, therefore, and nothing waits for a value. Each graph is tried first: where its update is not that without a
graph, bit for bit, or where something else speaks against graphs, all updates are made without.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import cuda

from smoothadv.errors import first_line, warn
from smoothadv.training.update import Inputs, Update


def are_offered_on(device: torch.device) -> bool:
    """Whether there are CUDA graphs."""
    return device.type == "cuda"


class SGD(torch.optim.SGD):
    """As torch.optim.SGD; the host does not read a learning rate that is a tensor [] on the device of the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        if not isinstance(group["lr"], torch.Tensor):
            return super().step(closure)
        weights = [weight for weight in group["params"] if weight.grad is not None]
        moves = torch._foreach_add([weight.grad for weight in weights], weights, alpha=group["weight_decay"])
        if group["momentum"]:
            for weight in weights:
                if self.state[weight].get("momentum_buffer") is None:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
            buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, moves)
            moves = tuple(buffers)
        torch._foreach_sub_(weights, torch._foreach_mul(moves, group["lr"]))

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        (group,) = self.param_groups
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def sgd(model: torch.nn.Module, device: torch.device, rate: float, momentum: float, weight_decay: float) -> SGD:
    """The optimizer of a model on the device; where there are CUDA graphs, its learning rate is there too."""
    kept = torch.full((), rate, device=device) if are_offered_on(device) else rate
    return SGD(model.parameters(), kept, momentum=momentum, weight_decay=weight_decay)


class GraphedUpdate:
    """Makes the updates of ``update`` by CUDA graphs, one for each shape of a batch; its optimizer is one of ``sgd``.

    The first update of a shape is made without a graph, the second in both ways. A single process has the step of the
    weights in its graph; of several, each has its gradients there, and exchanges them afterwards. ``trouble`` says
    why graphs were given up.
    """

    def __init__(self, update: Update) -> None:
        self.update, self.trouble = update, ""
        self._seen: set[object] = set()
        self._graphs: dict[object, _Graph] = {}
        self._stream, self._pool = cuda.Stream(update.device), cuda.graph_pool_handle()

    @property
    def is_used(self) -> bool:
        """Whether there is a graph."""
        return bool(self._graphs)

    def __call__(self, *batch: Any) -> torch.Tensor:
        """As ``Update.__call__``."""
        inputs = self.update.prepared(*batch)
        kind = inputs.images.shape, inputs.noise.shape, inputs.whole, inputs.epsilon > 0
        if kind in self._graphs:
            sums = self._graphs[kind](inputs)
        else:
            sums = self._computed(inputs) if self.trouble else self._introduced(kind, inputs)
        if self.update.processes.size > 1:
            self.update.step()
        return sums

    def _computed(self, inputs: Inputs, choices: torch.Generator | None = None) -> torch.Tensor:
        """What a graph can hold of an update."""
        choices = self.update.seeded(inputs.address) if choices is None else choices
        sums = self.update.gradients(inputs, choices)
        if self.update.processes.size == 1:
            self.update.step()
        return sums

    def _introduced(self, kind: object, inputs: Inputs) -> torch.Tensor:
        """An update of a kind that has no graph; it may have one afterwards."""
        before = _Kept(self._state())
        try:
            if kind in self._seen:
                return self._compared(kind, inputs, before)
            self._seen.add(kind)
            usual = cuda.current_stream(self.update.device)
            self._stream.wait_stream(usual)
            with cuda.stream(self._stream):  # PyTorch asks for a run on such a stream before a graph is made
                sums = self._computed(_on_device(inputs))
            usual.wait_stream(self._stream)
            return sums
        except Exception as error:  # memory may be too small, and a user's objective may raise anything
            self._refuse(first_line(error))
        before.restore()
        return self._computed(inputs)

    def _compared(self, kind: object, inputs: Inputs, before: _Kept) -> torch.Tensor:
        """An update without a graph and again by a new one, which is kept if both are the same."""
        update, given = self.update, _on_device(inputs)
        choices = update.seeded(inputs.address)
        random = [choices.get_state(), cuda.get_rng_state(update.device)]
        with _noting_waits() as waits:
            sums = self._computed(given, choices)
        after, gradients = _Kept(self._state()), self._gradients()
        if not _same(random, [choices.get_state(), cuda.get_rng_state(update.device)]):
            self._refuse("layers or the attack draw random numbers")
        elif waits:
            self._refuse("the host waits for values in the midst of an update")
        elif not _has_room(update.device):
            self._refuse("there is no memory for two updates")
        else:
            graph = _Graph(lambda: self._computed(given, choices), given, update.model, self._stream, self._pool)
            before.restore()
            if _same([sums, *after.values, *gradients], [graph(inputs), *self._state(), *self._gradients()]):
                self._graphs[kind] = graph
            else:
                after.restore()
                _attach(update.model, gradients)
                self._refuse("a graph computed something else")
        return sums

    def _state(self) -> list[torch.Tensor]:
        """All that an update changes and the next one reads."""
        states = self.update.optimizer.state.values()
        momenta = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return [*self.update.model.parameters(), *self.update.model.buffers(), *momenta]

    def _gradients(self) -> list[torch.Tensor | None]:
        return [weight.grad for weight in self.update.model.parameters()]

    def _refuse(self, reason: str) -> None:
        self.trouble = reason
        self._graphs.clear()
        if self.update.processes.is_first:
            warn(f"updates are made without CUDA graphs, which costs speed: {reason}")


class _Graph:
    """``work``, which reads ``given`` and returns sums, as a graph: a function of other inputs of the same shapes."""

    def __init__(
        self, work: Callable[[], torch.Tensor], given: Inputs, model: torch.nn.Module, stream: Any, pool: Any
    ) -> None:
        self._given, self._model, self._graph = given, model, cuda.CUDAGraph()
        # Meanwhile other threads, which load images, may do what they like.
        with cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._sums = work()
        self._gradients = [weight.grad for weight in model.parameters()]

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        for name, value in vars(self._given).items():
            new = getattr(inputs, name)
            if isinstance(value, torch.Tensor):
                value.copy_(new) if isinstance(new, torch.Tensor) else value.fill_(new)
        self._graph.replay()
        _attach(self._model, self._gradients)
        return self._sums.clone()  # graphs share their memory


class _Kept:
    """Copies of the ``values`` of tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors, self.values = tensors, [tensor.detach().clone() for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        torch._foreach_copy_(self._tensors, self.values)


def _on_device(inputs: Inputs) -> Inputs:
    """The inputs in memory of their own, with all numbers in tensors on the device."""
    held: dict[str, Any] = {name: value.clone() for name, value in vars(inputs).items() if torch.is_tensor(value)}
    for name in ("epsilon", "weight"):
        number = getattr(inputs, name)
        if name == "weight" or number > 0:  # without an attack there are other kernels
            held[name] = torch.full((), number, dtype=torch.float64, device=inputs.images.device)
    return replace(inputs, **held)


def _attach(model: torch.nn.Module, gradients: list[torch.Tensor | None]) -> None:
    for weight, gradient in zip(model.parameters(), gradients):
        weight.grad = gradient


def _same(ones: list[Any], others: list[Any]) -> bool:
    """Whether tensors, or None, are equal."""
    pairs = zip(ones, others)
    return all(one is other if one is None or other is None else torch.equal(one, other) for one, other in pairs)


@contextlib.contextmanager
def _noting_waits() -> Iterator[list[str]]:
    """What PyTorch says within, if the host waits for the device: a graph cannot."""
    waits: list[str] = []
    mode = cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            cuda.set_sync_debug_mode(mode)
            waits += [str(each.message) for each in caught if "called a synchronizing" in str(each.message)]


def _has_room(device: torch.device) -> bool:
    """Whether an update without a graph, of another shape, and an evaluation will find memory beside a graph."""
    used = cuda.memory_allocated(device)
    free = cuda.mem_get_info(device)[0] + cuda.memory_reserved(device) - used
    return free >= 2 * (cuda.max_memory_allocated(device) - used)
