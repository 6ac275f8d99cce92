"""Two real processes compute the updates of one process, and take over the first one's state and
decisions.

This file is also the program of those processes, which are launched once for all checks.
"""

import copy
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from smoothadv.attacks import ATTACKS
from smoothadv.base import distributed
from smoothadv.base.distributed import Processes, is_launched
from smoothadv.datasets import describe_dataset
from smoothadv.datasets.images import InMemoryImages
from smoothadv.objectives import OBJECTIVES as KINDS
from smoothadv.objectives.gaussian import Gaussian
from smoothadv.objectives.smoothadv import SmoothAdv
from smoothadv.training.execution import Execution
from smoothadv.training.teacher import NoisyVotes, for_label, until_precise
from smoothadv.training.update import Address, Update
from support.trainings import KnownShares

CPU = torch.device("cpu")

FIRST = {
    "gaussian": Gaussian(0.25),
    "smoothadv": SmoothAdv(ATTACKS["PGD"](0.5, 3), 0.25, 2, warmup=0),
}
OBJECTIVES = {
    **FIRST,
    **{name: KINDS[name](noise_sd=0.25) for name in KINDS if name not in FIRST},
    "acr-weakness": KINDS["acr-weakness"](noise_sd=0.25, attack_from_epoch=0),
}
# (images in the batch of all processes, weight of the loss) of each update.
UPDATES = [(7, 1.0), (2, 0.5), (8, 1.0)]


def network(normalized: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 4, 3, bias=False),
        *([nn.BatchNorm2d(4)] if normalized else []),
        nn.Softplus(),
    ]
    return nn.Sequential(
        nn.Identity(), nn.Sequential(*layers, nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    )


# Objective, micro-batch and network of each run.
RUNS: dict[str, tuple[str, int, Callable[[], nn.Module]]] = {
    "gaussian": ("gaussian", 8, network),
    "gaussian by 3": ("gaussian", 3, network),
    "smoothadv": ("smoothadv", 8, network),
    "smoothadv by 1": ("smoothadv", 1, network),
    "smoothadv by 2": ("smoothadv", 2, network),
    **{name: (name, 3, network) for name in OBJECTIVES if name not in FIRST},
}


def updater(model: nn.Module, objective: str, micro_batch: int, processes: Processes) -> Update:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-2)
    shares = torch.eye(3, dtype=torch.float64)[torch.arange(8) % 3] * 0.7 + 0.1
    teacher, example = (
        KnownShares(nn.Sequential(network(), nn.Linear(3, 3)).double(), shares),
        torch.zeros(2, 1, 8, 8),
    )
    return Update(
        model,
        OBJECTIVES[objective],
        optimizer,
        Execution(),
        processes,
        CPU,
        example,
        micro_batch,
        teacher,
    )


def do_update(update: Update, processes: Processes, step: int) -> torch.Tensor:
    """An update on this process's part of a batch; returns the sums over all processes."""
    size, weight = UPDATES[step]
    generator = torch.Generator().manual_seed(step)
    dtype = next(update.model.parameters()).dtype
    images = torch.rand(size, 1, 8, 8, generator=generator, dtype=dtype)
    labels = torch.randint(3, (size,), generator=generator)
    indices, _ = processes.share(torch.arange(size))
    seen = update(images[indices], labels[indices], torch.arange(size), Address(3, 0, step), weight)
    return processes.total(seen)


def trained(processes: Processes, objective: str, micro_batch: int, build: Callable[[], nn.Module]):
    """For each update the weights after it, and its sums."""
    model = build().double()
    update = updater(model, objective, micro_batch, processes)
    history = []
    for step in range(len(UPDATES)):
        sums = do_update(update, processes, step)
        history.append(
            {
                "weights": torch.cat([each.detach().flatten() for each in model.parameters()]),
                "sums": sums,
            }
        )
    return history


def evaluated(processes: Processes) -> dict[str, float]:
    """An evaluation without noise."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (21, 1, 8, 8), dtype=torch.uint8, generator=generator)
    model = network(normalized=True)
    with torch.no_grad():  # right about most of them
        labels = copy.deepcopy(model).eval()(pixels.float() / 255).argmax(1)
    labels[::4] = (labels[::4] + 1) % 3
    images = InMemoryImages(pixels, labels, describe_dataset("digits"))
    objective, optimizer = (
        SmoothAdv(ATTACKS["PGD"](3.0, 5), 0.0),
        torch.optim.SGD(model.parameters(), 0.1),
    )
    update = Update(
        model, objective, optimizer, Execution(), processes, CPU, torch.zeros(1, 1, 8, 8), 4
    )
    # Batches of four, the last of one image.
    return update.evaluate(images, torch.arange(21), 4, Address(0, 0, 0))


def votes(processes: Processes, seed: int = 4) -> list[Any]:
    """For the labels of five images, in an order of their own, and of one of them; and of all
    classes on four.
    """
    pixels = torch.randint(
        256, (21, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    images = InMemoryImages(pixels, torch.arange(21) % 3, describe_dataset("digits"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)
    noisy = NoisyVotes(model, images, 1.0, CPU, 16, processes)
    of_label = functools.partial(for_label, 40)
    asked = (
        ([20, 3, 7, 0, 9], of_label, ()),
        ([20], of_label, ()),
        ([20, 3, 7, 0], lambda label: until_precise(40), (10,)),
    )
    return [
        noisy.count(np.array(which), seed, voting, shape, "votes").tolist()
        for which, voting, shape in asked
    ]


def statistics(processes: Processes) -> dict[str, Any]:
    """Batch normalization statistics after two updates, before and after sharing, and those that
    the attack uses.
    """
    model = network(normalized=True)
    update = updater(model, "smoothadv", 8, processes)
    for step in range(2):
        do_update(update, processes, step)
    weights = torch.cat([each.detach().flatten() for each in model.parameters()])
    before = copy.deepcopy(dict(model.named_buffers()))
    processes.share_buffers(model)
    return {
        "weights": weights,
        "before": before,
        "after": dict(model.named_buffers()),
        "folded": [each for each in update.folded.parameters() if not each.requires_grad],
    }


def everything(processes: Processes, folder: Path) -> dict[str, Any]:
    """All results of one of the processes."""
    found: dict[str, Any] = {name: trained(processes, *run) for name, run in RUNS.items()}
    found["evaluated"], found["statistics"] = evaluated(processes), statistics(processes)
    found["votes"] = votes(processes)
    found["decision"] = processes.received(5 + processes.rank)
    own = torch.tensor([1.0 + processes.rank, 10.0])
    found["total"], found["own"] = processes.total(own), own
    found["received"] = processes.received(
        {"list": [processes.rank, "text"], "tensor": torch.full((2,), processes.rank)}
    )
    found["nothing received"] = processes.received(None if processes.is_first else "something")
    with processes.first_goes_first():
        found["came first"] = not (folder / "been here").exists()
        time.sleep(0.2 * processes.is_first)
        (folder / "been here").touch()
    return found


def main(folder: Path) -> None:
    processes = Processes(launched=True)
    with processes.connected(CPU):
        torch.save(everything(processes, folder), folder / f"{processes.rank}.pt")


@pytest.fixture(scope="module")
def found(warm, tmp_path_factory) -> list[dict[str, Any]]:
    """The results of each of two processes."""
    folder = tmp_path_factory.mktemp("processes")
    done = warm.run_workers(2, [sys.executable, __file__, str(folder)], folder)
    assert [process.returncode for process in done] == [0, 0], "\n".join(
        process.stderr for process in done
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_the_weights_of_one(found, name):
    """After every one of three updates, of 2 to 8 images, in micro-batches of which they have more
    or fewer.
    """
    for step, expected in enumerate(trained(Processes(), *RUNS[name])):
        first, second = (process[name][step] for process in found)
        assert torch.equal(first["weights"], second["weights"]), f"update {step}"
        assert (first["weights"] - expected["weights"]).abs().max() < 1e-10, f"update {step}"
        torch.testing.assert_close(first["sums"], expected["sums"], rtol=1e-10, atol=1e-10)


def test_two_processes_evaluate_as_one(found):
    expected = evaluated(Processes())
    assert found[0]["evaluated"] == found[1]["evaluated"] == pytest.approx(expected, abs=2e-6)
    assert 0 < expected["test_adversarial_accuracy"] < expected["test_accuracy"] < 1


def test_two_processes_count_the_votes_of_one(found):
    """Each image's noise is a function of its index, wherever it is; another seed is a negative
    control.
    """
    alone = [of_labels, of_one, of_classes] = votes(Processes())
    assert found[0]["votes"] == found[1]["votes"] == alone != votes(Processes(), 5)
    assert of_one == of_labels[:1] and 0 < of_classes[0][2] <= of_labels[0] < 40


def test_all_take_over_the_statistics_of_the_first(found):
    first, second = (process["statistics"] for process in found)
    assert torch.equal(first["weights"], second["weights"])
    moving = [name for name, value in first["before"].items() if value.is_floating_point()]
    assert len(moving) == 2
    for name in first["before"]:
        assert torch.equal(first["after"][name], first["before"][name])
        assert torch.equal(second["after"][name], first["before"][name])
    assert len(first["folded"]) == 2 and all(map(torch.equal, first["folded"], second["folded"])), (
        "and attack the same"
    )
    # Negative control: until then each had the statistics of its own images.
    assert all(
        (first["before"][name] - second["before"][name]).abs().max() > 1e-4 for name in moving
    )


def test_what_the_first_has_and_decides_all_get(found):
    assert [process["decision"] for process in found] == [5, 5]
    assert [process["total"].tolist() for process in found] == [[3.0, 20.0]] * 2
    assert [process["own"].tolist() for process in found] == [[1.0, 10.0], [2.0, 10.0]], (
        "left alone"
    )
    for process in found:
        assert process["received"]["list"] == [0, "text"] and process["received"][
            "tensor"
        ].tolist() == [0, 0]
        assert process["nothing received"] is None
    assert [process["came first"] for process in found] == [True, False]


@pytest.mark.parametrize("count", [1, 2, 5, 7, 8, 256])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_parts_of_the_batch(count, size):
    batch = torch.randperm(1000)[:count]
    parts = []
    for rank in range(size):
        processes = Processes()
        processes.rank, processes.size = rank, size
        indices, where = processes.share(batch)
        assert torch.equal(indices, batch[where])
        parts.append(indices)
    assert torch.equal(torch.cat(parts), batch), "each image once"
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_what_a_batch_system_may_have_set_means_nothing_without_torchrun(monkeypatch):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    launched = Processes(launched=True)
    assert (launched.rank, launched.size, launched.local_rank, launched.launch) == (5, 8, 1, None)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not is_launched()


@pytest.mark.parametrize("as_stored", [True, False])
def test_tensors_of_all_layouts_are_exchanged_as_one(as_stored):
    """As gradients come: channels-last, transposed, expanded, strided, of one element and of
    none.
    """
    torch.manual_seed(0)
    last = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    tensors = [
        last,
        torch.randn(2, 5).T,
        torch.randn(3, 1).expand(3, 4),
        torch.randn(8)[::2],
        torch.randn(()),
        last[:0],
    ]
    flat, views = distributed._in_one_tensor(tensors, as_stored)
    assert flat.shape == (sum(tensor.numel() for tensor in tensors),)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    assert [view.stride() == each.stride() for view, each in zip(views[:2], tensors)] == [
        as_stored
    ] * 2
    assert as_stored or torch.equal(flat, torch.cat([tensor.flatten() for tensor in tensors]))
    flat *= 2
    assert all(torch.equal(view, 2 * tensor) for view, tensor in zip(views, tensors))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
