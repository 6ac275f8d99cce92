"""Pickles that run a command when they are loaded without care."""

import os
from pathlib import Path


class Trap:
    """An object whose pickle asks the loader to call a function that creates the folder ``marker``:
    os.system, or exec.
    """

    def __init__(self, marker: Path, function=os.system) -> None:
        self.marker, self.function = marker, function

    def __reduce__(self):
        if self.function is os.system:
            return os.system, (f'mkdir "{self.marker}"',)
        return self.function, (f"__import__('os').mkdir({str(self.marker)!r})",)
