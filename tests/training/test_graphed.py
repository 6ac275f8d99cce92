"""Updates made as CUDA graphs are those made without, bit for bit; a graph that would not be one is
not used.
"""

import copy
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from smoothadv.attacks import ATTACKS
from smoothadv.base.distributed import Processes
from smoothadv.base.errors import DoubtfulWarning
from smoothadv.objectives import OBJECTIVES
from smoothadv.objectives.gaussian import Gaussian
from smoothadv.objectives.smoothadv import SmoothAdv
from smoothadv.training.execution import Execution
from smoothadv.training.graphed import GraphedUpdate
from smoothadv.training.schedule import Schedule, optimizer_of
from smoothadv.training.update import Address, Update
from support.commands import succeed
from support.recorded_graphs import recorded_graphs as recorded_graphs
from support.trainings import KnownShares, same_state

CPU = torch.device("cpu")
SIGMA = 0.25
# Of seven updates: epoch, which decides epsilon; learning rate; weight of the loss; images.
UPDATES = [
    (0, 0.1, 1.0, 6),
    (2, 0.1, 1.0, 6),
    (2, 0.1, 1.0, 6),
    (2, 0.1, 0.5, 6),
    (3, 0.1, 1.0, 6),
    (3, 0.1, 1.0, 4),
    (4, 0.02, 1.0, 6),
    (5, 0.02, 1.0, 6),
]


class Two(Processes):
    """The first of two processes, each with half of a batch; the second has the same gradients."""

    size, averaged = 2, 0

    def average_gradients(self, model: nn.Module) -> None:
        self.averaged += 1

    def share_buffers(self, model: nn.Module) -> None:
        pass


class Both:
    """The same network, updated with graphs and without."""

    def __init__(
        self,
        objective,
        micro=6,
        precision="fp32",
        momentum=0.9,
        processes=Processes,
        layer=nn.Identity,
        kind="sgd",
    ):
        torch.manual_seed(0)
        layers = [
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            layer(),
            nn.Linear(64, 10),
        ]
        network = nn.Sequential(nn.Identity(), nn.Sequential(*layers))
        execution, example, teacher = (
            Execution(precision),
            torch.rand(2, 1, 8, 8),
            copy.deepcopy(network).eval(),
        )
        teacher = KnownShares(teacher.requires_grad_(False), torch.rand(12, 10).softmax(1))
        self.updates = []
        for _ in range(2):
            model = execution.prepare(copy.deepcopy(network), CPU)
            rates = Schedule(1, 6, 0.1, 1, 0.1, momentum, 1e-2, optimizer=kind)
            optimizer = optimizer_of(rates, model, CPU)
            more = execution, processes(), CPU, example, micro, teacher
            self.updates.append(Update(model, objective, optimizer, *more))
        self.updates[1].compute = self.graphed = GraphedUpdate(self.updates[1])

    def found(self, sums: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Of each network: the sums, all weights, buffers, momenta and gradients."""
        for update, ours in zip(self.updates, sums):
            momenta = [
                value for state in update.optimizer.state.values() for value in state.values()
            ]
            gradients = [parameter.grad for parameter in update.model.parameters()]
            yield [ours, *update.model.state_dict().values(), *momenta, *gradients]

    def differences(self, updates=UPDATES) -> list[int]:
        """The updates after which something was not equal."""
        different = []
        for number, (epoch, rate, weight, count) in enumerate(updates):
            generator = torch.Generator().manual_seed(number)
            images = torch.rand(count, 1, 8, 8, generator=generator).contiguous(
                memory_format=torch.channels_last
            )
            labels, sums = torch.randint(10, (count,), generator=generator), []
            for update in self.updates:
                (group,) = update.optimizer.param_groups
                group["lr"] = group["lr"].fill_(rate) if torch.is_tensor(group["lr"]) else rate
                whole = torch.arange(count * self.updates[0].processes.size)
                sums.append(update(images, labels, whole, Address(7, epoch, number), weight))
            ours, theirs = self.found(sums)
            if len(ours) != len(theirs) or not all(map(torch.equal, ours, theirs)):
                different.append(number)
        return different


def smoothadv(attack: str = "PGD", copies: int = 1, **of_attack) -> SmoothAdv:
    return SmoothAdv(ATTACKS[attack](0.5, 2, **of_attack), SIGMA, copies, warmup=4)


@pytest.mark.parametrize(
    ("objective", "how", "replays"),
    [
        (smoothadv(), {}, 5),
        (smoothadv("DDN", 2), {}, 5),
        (smoothadv("PGD", 2), {"micro": 4, "momentum": 0.0}, 5),
        (smoothadv("DDN"), {"micro": 4, "precision": "bf16"}, 5),
        (smoothadv("PGD", 2), {"processes": Two}, 5),
        (Gaussian(SIGMA), {}, 6),
        (OBJECTIVES["acr-weakness"](noise_sd=SIGMA, attack_from_epoch=2), {}, 5),
        (OBJECTIVES["cat-rs"](noise_sd=SIGMA, noise_steps=2), {"micro": 4}, 6),
        (OBJECTIVES["cat-rs"](noise_sd=SIGMA, noise_steps=2, noise_epsilon=0.7), {}, 6),
        (OBJECTIVES["smoothmix"](noise_sd=SIGMA, warmup=6, mix_steps=2), {"micro": 4}, 6),
        (
            OBJECTIVES["smoothmix"](noise_sd=SIGMA, warmup=6, mix_steps=2, one_step_adversary=True),
            {},
            6,
        ),
        (OBJECTIVES["distillation"](noise_sd=SIGMA, transfer=0.3), {}, 6),
        (OBJECTIVES["consistency"](noise_sd=SIGMA), {"kind": "adamw"}, 6),
    ],
    ids="PGD,DDN m=2,micro-batches,bf16,processes,Gaussian,acr-weakness,cat-rs,cat-rs .7,smoothmix,"
    "first step,distillation,AdamW".split(","),
)
def test_graphs_make_the_same_updates(objective, how, replays, recorded_graphs, monkeypatch):
    """Images, noise, epsilon, learning rate and weight change; a first update of each shape has no
    graph.
    """
    for name in ("torch.optim.adam", "torch.optim.adamw"):  # a CPU may do what GPUs can
        patch = sys.modules[name], "_get_capturable_supported_devices", lambda *_, **__: ["cpu"]
        monkeypatch.setattr(*patch, raising=False)
    both = Both(objective, **how)
    assert both.differences() == [] and both.graphed.is_used
    (graph,) = recorded_graphs.graphs
    assert graph.replays == replays
    if "processes" in how:
        assert [update.processes.averaged for update in both.updates] == [len(UPDATES)] * 2, (
            "exchanged as often"
        )


class Reading(SmoothAdv):
    """A user's objective that looks at epsilon."""

    def attacked(self, model, batch, generator=None):
        return super().attacked(model, replace(batch, epsilon=float(batch.epsilon)), generator)


class Picky(SmoothAdv):
    """A user's objective that takes numbers alone."""

    def attacked(self, model, batch, generator=None):
        assert isinstance(batch.epsilon, float), "a number is required"
        return super().attacked(model, batch, generator)


class Averaging(nn.Module):
    """A layer whose buffer is another tensor after each pass, where a graph would write to the
    first one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean()
        return x


@pytest.mark.parametrize(
    ("objective", "how", "change", "reason"),
    [
        (smoothadv(), {"layer": nn.Dropout}, {}, "layers or the attack draw random numbers"),
        (smoothadv(), {"layer": Averaging}, {}, "other tensors in the place of its buffers"),
        (smoothadv(random_start=True), {}, {}, "layers or the attack draw random numbers"),
        (Reading(ATTACKS["PGD"](0.5, 2), SIGMA), {}, {}, "not permitted when stream is capturing"),
        (Picky(ATTACKS["PGD"](0.5, 2), SIGMA), {}, {}, "a number is required"),
        (smoothadv(), {}, {"fails": "CUDA out of memory."}, "CUDA out of memory."),
        (
            smoothadv(),
            {"processes": Two},
            {"free": 99},
            "memory suffices for one update, not for two",
        ),
        (smoothadv(), {"processes": Two}, {"lost": 3}, "it computes something else"),
        (smoothadv(), {}, {"lost": 3}, "it computes something else"),
    ],
    ids=[
        "dropout",
        "buffer",
        "random start",
        "wait",
        "exception",
        "out of memory",
        "little memory",
        "of two",
        "wrong",
    ],
)
def test_updates_without_graphs_go_on(objective, how, change, reason, recorded_graphs):
    """Nothing of what was tried remains, and it is told once, of updates of two sizes, each tried
    at its second one.
    """
    recorded_graphs.configure_mock(**change)
    both = Both(objective, **how)
    with pytest.warns(DoubtfulWarning) as told:
        assert both.differences([*UPDATES[1:4], *2 * UPDATES[5:7]]) == []
    assert not both.graphed.is_used
    (line,) = (str(each.message) for each in told)
    assert line.startswith("an update cannot be a CUDA graph") and reason in line


def test_learning_rate_on_the_device_makes_the_usual_steps(recorded_graphs):
    torch.manual_seed(0)
    ours, usual = (nn.Linear(3, 2).double() for _ in range(2))
    usual.load_state_dict(ours.state_dict())
    optimizers = [
        optimizer_of(Schedule(1, 6, 0.25, 1, momentum=0.9, weight_decay=0.1), ours, CPU),
        torch.optim.SGD(usual.parameters(), 0.25, 0.9, weight_decay=0.1),
    ]
    for _ in range(4):
        images = torch.rand(5, 3, dtype=torch.float64)
        for model, optimizer in zip((ours, usual), optimizers):
            optimizer.zero_grad()
            model(images).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, usual.weight, rtol=1e-12, atol=1e-12)


def test_runs_are_the_same_with_graphs_and_say_so(workplace, recorded_graphs):
    """Of two runs of two epochs, one after the other, one has graphs in the first epoch and one in
    the second.
    """
    words = [
        "--noise",
        0.25,
        "--attack",
        "PGD",
        "--epsilon",
        0.5,
        "--num-steps",
        1,
        "--warmup",
        1,
        "--device",
        "cpu",
        "--batch",
        32,
        "--steps-per-epoch",
        4,
        "--lr-step-size",
        1,
        "--evaluate-images",
        10,
        "--resume",
    ]
    for name, graphs in {"one": (True, False), "other": (False, True)}.items():
        for epochs, has_graphs in enumerate(graphs, start=1):
            more = ["--epochs", epochs, *([] if has_graphs else ["--no-cuda-graph"])]
            succeed("train_pgd", "digits", "digits_resnet8", name, *words, *more)
        runs = json.loads(Path(name, "args.json").read_text())["runs"]
        assert tuple("cuda_graph" in run for run in runs) == graphs
    assert same_state(Path("one"), Path("other"))
    assert [graph.replays for graph in recorded_graphs.graphs] == [3, 3]
