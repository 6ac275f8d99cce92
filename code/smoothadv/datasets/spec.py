"""What every run on images says: which images, which machine, which seed, and what to do with
earlier output.
"""

from dataclasses import dataclass
from typing import Any

from smoothadv.base.cpus import MOST_THREADS
from smoothadv.base.errors import UsageError, UserError
from smoothadv.base.settings import EXISTING, Checked, any_seed, number, one_of, setting
from smoothadv.datasets import DATASETS, source_of

thread_count = number(int, "a whole number from 1 to 1,024", lambda v: 1 <= v <= MOST_THREADS)


def device(text: str) -> Any:
    """Parses a torch.device that can be used; only who names one waits for torch."""
    from smoothadv.base.devices import usable_device

    return usable_device(text)


def _known_datasets() -> str:
    sources = [(name, DATASETS[name]) for name in DATASETS]
    names = [f"{name}:{one.location}" if one.takes_location else name for name, one in sources]
    return f"one of {', '.join(names)}"


@dataclass(frozen=True, kw_only=True)
class RunSpec(Checked):
    """The settings that all runs share; ``dataset`` is a name, or the images themselves."""

    dataset: Any = setting(flag="dataset", keyword=False, help=_known_datasets)
    data_dir: str | None = setting(
        None,
        parse=str,
        metavar="DIR",
        group="running",
        help="folder of the dataset's files (default: data; for imagenet IMAGENET_DIR)",
    )
    device: Any = setting(
        None,
        parse=device,
        group="running",
        help="torch device like cpu or cuda:1 (default: cuda if there is one)",
    )
    threads: int | None = setting(
        None,
        parse=thread_count,
        metavar="N",
        group="running",
        keyword=False,
        help="threads of PyTorch on the CPU (default: OMP_NUM_THREADS, else what suits the images)",
    )
    seed: int = setting(
        0, parse=any_seed, group="running", records="seed", help="seed of all randomness"
    )
    existing: str = setting(
        "resume",
        parse=one_of(EXISTING),
        group="running",
        constants={
            "resume": "continue the output of an earlier run of the same command",
            "overwrite": "replace the output of an earlier run",
        },
        help='"resume" continues earlier output, "overwrite" replaces it, "refuse" raises',
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.dataset, str):
            try:
                source_of(self.dataset)
            except UserError as error:
                reason = self.missing_plugin() or error
                raise UsageError(f"argument DATASET: {reason}") from error

    def _set(self, **values: Any) -> None:
        """Complete the spec, which is frozen, while it is made."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def missing_plugin(self) -> str:
        """Which plug-in knows the dataset, as a sentence, where a checkpoint tells; else ""."""
        return ""
