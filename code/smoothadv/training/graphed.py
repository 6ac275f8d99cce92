"""Updates as CUDA graphs: the kernels of an update, recorded once, are launched together, without
the host's delays.

A graph repeats what was recorded: the same kernels on the same memory. All that changes from update
to update is in tensors, therefore, and nothing waits for a value. Each graph is tried first: if it
fails, or computes another update than without a graph, bit for bit, updates are made without.
"""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import cuda

from smoothadv.base.errors import first_line, warn
from smoothadv.training.update import Inputs, Update


class GraphedUpdate:
    """An ``Update.compute`` by CUDA graphs, one for each shape of a batch, with an optimizer of
    ``schedule.optimizer_of``.

    The first time it is computed without a graph, the second time in both ways. ``is_used`` says
    whether there is a graph. The first reason to do without is a warning.
    """

    is_used, _has_warned = False, False

    def __init__(self, update: Update) -> None:
        self._update, self._stream = update, cuda.Stream(update.device)
        self._pool = cuda.graph_pool_handle()
        self._ways: dict[object, Any] = {}

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        kind = inputs.images.shape, inputs.noise.shape, inputs.whole, inputs.epsilon > 0
        if kind in self._ways:
            return self._ways[kind](inputs)
        model, self._ways[kind] = self._update.model, partial(self._tried, kind)
        places = [value.data_ptr() for value in model.buffers()]
        sums = self._update.computed(inputs)
        if places != [value.data_ptr() for value in model.buffers()]:
            self._refuse(kind, "a layer puts other tensors in the place of its buffers")
        return sums

    def _tried(self, kind: object, inputs: Inputs) -> torch.Tensor:
        """Compute both without a graph and by a new one, which is kept if it computes the same."""
        update, optimizer = self._update, self._update.optimizer
        momenta = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if torch.is_tensor(value)
        ]
        state = [
            value.detach()
            for value in (*update.model.parameters(), *update.model.buffers(), *momenta)
        ]
        before = [value.clone() for value in state]
        try:
            sums = self._checked(inputs, update.seeded(inputs))
            expected = [value.clone() for value in (sums, *state, *_gradients(update))]
            graph = _Graph(update, inputs, self._stream, self._pool)
            torch._foreach_copy_(state, before)
            sums = graph(inputs)
            if all(map(torch.equal, expected, (sums, *state, *_gradients(update)))):
                self._ways[kind], self.is_used = graph, True
                return sums
            reason = "it computes something else"
        except (
            Exception
        ) as error:  # memory may be too small, and a user's objective may raise anything
            reason = first_line(error)
        self._refuse(kind, reason)
        torch._foreach_copy_(state, before)
        return update.computed(inputs)

    def _refuse(self, kind: object, reason: str) -> None:
        self._ways[kind] = self._update.computed
        if self._update.processes.is_first and not self._has_warned:
            warn(f"an update cannot be a CUDA graph, which costs speed: {reason}")
        self._has_warned = True

    def _checked(self, inputs: Inputs, choices: torch.Generator) -> torch.Tensor:
        """Compute without a graph, on another stream, as PyTorch asks before recording;
        RuntimeError: do not record.
        """
        device, usual, mode = (
            self._stream.device,
            cuda.current_stream(self._stream.device),
            cuda.get_sync_debug_mode(),
        )
        random = [choices.get_state(), cuda.get_rng_state(device)]
        self._stream.wait_stream(usual)
        with cuda.stream(self._stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch calls this a prototype
            cuda.set_sync_debug_mode(
                "error"
            )  # where the host waits for a value: recording could not be ended
            try:
                sums = self._update.computed(_on_device(inputs), choices)
            finally:
                cuda.set_sync_debug_mode(mode)
                usual.wait_stream(self._stream)
        if not all(map(torch.equal, random, [choices.get_state(), cuda.get_rng_state(device)])):
            raise RuntimeError("layers or the attack draw random numbers")
        # Beside the graph, other batches and evaluations need memory.
        used = cuda.memory_allocated(device)
        free = cuda.mem_get_info(device)[0] + cuda.memory_reserved(device) - used
        if free < 2 * (cuda.max_memory_allocated(device) - used):
            raise RuntimeError("memory suffices for one update, not for two")
        return sums


class _Graph:
    """``update.computed`` of ``inputs`` as a graph: a function of others of the same shapes."""

    def __init__(self, update: Update, inputs: Inputs, stream: Any, pool: Any) -> None:
        self._inputs, self._graph = _on_device(inputs), cuda.CUDAGraph()
        choices = update.seeded(inputs)
        # Meanwhile other threads, which load images, may do what they like.
        with cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._sums = update.computed(self._inputs, choices)
        self._gradients = [(weight, weight.grad) for weight in update.model.parameters()]

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        for name, value in vars(self._inputs).items():
            if isinstance(value, torch.Tensor):
                new = getattr(inputs, name)
                if isinstance(new, torch.Tensor):
                    value.copy_(new)
                else:
                    value.fill_(new)  # to copy it from the host would wait for the device
        self._graph.replay()
        for weight, gradient in self._gradients:
            weight.grad = gradient
        return self._sums.clone()  # graphs share their memory


def _gradients(update: Update) -> list[torch.Tensor]:
    return [weight.grad for weight in update.model.parameters() if weight.grad is not None]


def _on_device(inputs: Inputs) -> Inputs:
    """The inputs in memory of their own, with numbers in tensors on the device; without an attack
    epsilon stays 0.
    """
    copies: dict[str, Any] = {
        name: value.clone() for name, value in vars(inputs).items() if torch.is_tensor(value)
    }
    number = partial(torch.full, (), dtype=torch.float64, device=inputs.images.device)
    epsilon = number(inputs.epsilon) if inputs.epsilon > 0 else 0.0
    return replace(
        inputs, **copies, weight=number(inputs.weight), epsilon=epsilon, epoch=number(inputs.epoch)
    )
