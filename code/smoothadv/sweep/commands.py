"""What a sweep knows of the commands that it runs: which files each will write, and what these
will record. A sweep knows nothing else of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrainingExpectation:
    """What a training command will do, as far as it is known before it runs.

    ``recipe`` has the fields of its record that are known before any file is read; ``digests`` has
    the checkpoints that it reads, by the field that will have their SHA-256; ``files`` are further
    files that it reads. ``objective`` is a name; ``attack`` has the name of the attack and its
    settings (None: no attack); ``copies`` is the number of noisy copies of an image.
    """

    epochs: int
    recipe: Mapping[str, Any]
    objective: str
    attack: Mapping[str, Any] | None = None
    copies: int = 1
    pseudo_label_weight: float | None = None
    digests: Mapping[str, Path] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class EvaluationExpectation:
    """What certify or attack will do: it writes ``logs``, whose manifests will have ``settings``.

    Every ``skip``-th image is evaluated, at most ``limit`` of them (None: all).
    """

    logs: tuple[Path, ...]
    settings: tuple[Mapping[str, Any], ...]
    skip: int = 1
    limit: int | None = None
    denoiser: str | None = None


class Commands(Protocol):
    """Reads command lines as the commands do, but runs nothing.

    Words begin with the command. Errors are usage errors of the command, and name the ``source`` of
    the words.
    """

    def option_words(self, command: str, options: Mapping[str, Any], source: str) -> list[str]:
        """The options in a table of a grid as words: true gives the switch, false its opposite or
        nothing.
        """

    def training(self, words: Sequence[str], source: str) -> TrainingExpectation:
        """What train or train_pgd will do."""

    def evaluation(
        self, words: Sequence[str], archs: Sequence[str], source: str
    ) -> EvaluationExpectation:
        """What certify or attack will do with a classifier whose members are of these
        architectures.
        """

    def lacking(self, words: Sequence[str]) -> str:
        """Why this machine cannot have the images of a command; "" if it can, now at the latest."""
