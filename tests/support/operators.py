"""The operators that PyTorch executes: on a GPU, each is a launch of some microseconds."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Within, ``calls`` lists those that compute or allocate something: no views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if not function.is_view:
            self.calls.append(function.overloadpacket)
        return function(*args, **(kwargs or {}))
