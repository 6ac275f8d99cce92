"""Reads the tensors of a checkpoint, whatever lies beside them, without running code of the file.

Programs save their arguments, NumPy's numbers and paths beside the weights, and PyTorch's safe
reader refuses the whole file for one of them. Here it gets a stand-in for each class and function
that it does not know: nothing is imported or called for the file, and a stand-in keeps nothing.
"""

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch

_UNKNOWN = re.compile(r"Unsupported global: GLOBAL (\S{1,200}) was not an allowed global")
_CONTAINER = re.compile(r"Can only (SETITEM|append|extend).* but got <class '(\S{1,200})'>")
_MOST = 200
"""The most stand-ins for a file: each costs a reading."""


class Inert:
    """What stands for an object of an unknown class, whatever it is made of."""

    def __new__(cls, *arguments: Any) -> Any:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"a {type(self).__module__}.{type(self).__qualname__}"


def _stand_in(name: str, container: type | None) -> type[Inert]:
    """A class that has the name of an unknown one; with a ``container``, a dict or a list, it makes
    empty ones.
    """
    module, _, own = name.rpartition(".")
    members: dict[str, Any] = {"__module__": module or "builtins"}
    if container is not None:
        members["__new__"] = lambda cls, *arguments: container()
    return type(own, (Inert,), members)


def read_inertly(path: Path) -> Any:
    """What is in a checkpoint file, tensors on the CPU, with ``Inert`` in place of other objects.

    Raises what PyTorch does where the file is damaged, no checkpoint, or asks for the system.
    """
    known: dict[tuple[str, type | None], type[Inert]] = {}
    while True:
        # Later ones replace earlier ones of the same name.
        latest = {name: made for (name, _), made in known.items()}
        try:
            with warnings.catch_warnings(), torch.serialization.safe_globals([*latest.values()]):
                # PyTorch warns about pickles, which it refuses here.
                warnings.simplefilter("ignore")
                return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            wanted: tuple[str, type | None]
            if unknown := _UNKNOWN.search(str(error)):
                wanted = (unknown[1], None)
            elif found := _CONTAINER.search(str(error)):
                wanted = (found[2], dict if found[1] == "SETITEM" else list)
            else:
                raise
            if wanted in known or len(known) >= _MOST:
                raise
            known[wanted] = _stand_in(*wanted)
