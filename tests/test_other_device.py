"""Every command and every function of Python on a device that is not the CPU: see
``support.stand_in``.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import smoothadv
from smoothadv.attacks import ATTACKS
from smoothadv.attacks.smoothed_attack import SmoothedAttack
from smoothadv.core import Smooth
from smoothadv.noise import RoundedGaussianNoise
from smoothadv.objectives import OBJECTIVES
from support import stand_in
from support.commands import rows, settings_of, succeed, timeless
from support.evaluations import EVALUATIONS, arguments_of
from support.staged import write_stages

pytestmark = pytest.mark.skipif(
    not stand_in.IS_POSSIBLE, reason="before 2.10, PyTorch lets no Python program be a device"
)
SIGMA, COUNT, CLASSES = 0.25, 3, 3
ON = ("--device", stand_in.NAME)
FEW = ("--max", COUNT, "--N", 60, "--N0", 20, *ON)
CHECKPOINT = "the committed one"
QUICKLY = ("--steps-per-epoch", 1, "--batch", 4, "--evaluate-images", 4)
IMAGES = torch.rand(COUNT, 3, 6, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(COUNT) % CLASSES


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return stand_in.install(monkeypatch.setattr)


@pytest.mark.parametrize(
    "faulty, says",
    {
        "sum": (lambda there: there + torch.ones(3), "same device"),
        "constant": (lambda there: torch.cat([there, torch.zeros(1)]), "same device"),
        "written": (lambda there: torch.add(there, there, out=torch.ones(3)), "same device"),
        "index": (lambda there: torch.ones(3)[there.long()], "same device"),
        "weights": (lambda there: nn.Linear(3, 1)(there), "same device"),
        "generator": (lambda there: there.normal_(generator=torch.Generator()), "generator"),
        "numpy": (np.asarray, "numpy"),
    }.values(),
)
def test_the_device_refuses_what_a_gpu_refuses(faulty, says, device):
    with pytest.raises((RuntimeError, TypeError), match=says):
        faulty(torch.ones(3, device=device))


def test_the_device_computes_as_the_cpu_but_where_a_gpu_does_not(device):
    levels = torch.arange(256.0, device=device)
    inverse = (levels / 255).cpu() / (torch.arange(256.0) * (torch.tensor(1.0) / 255))
    assert inverse[1:].eq(1).all() and (levels / 255).cpu().ne(torch.arange(256.0) / 255).any()
    by_tensor = levels / torch.full((), 255.0, device=device)
    assert by_tensor.cpu().equal(torch.arange(256.0) / 255)
    draws = [
        torch.rand(4, generator=torch.Generator(where).manual_seed(1), device=where).cpu()
        for where in (device, device, "cpu")
    ]
    assert draws[0].equal(draws[1]) and not draws[0].equal(draws[2])
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).eval()
    expected = network(IMAGES)
    assert network.to(device)(IMAGES.to(device)).cpu().equal(expected)


# The names of images choose them before any device has a part; an attack alone is in "restarts".
@pytest.mark.parametrize("kind", sorted(EVALUATIONS.keys() - {"named", "attack"}))
def test_evaluations(kind, checkpoint, workplace):
    count = 2 * COUNT if kind == "sets" else COUNT  # of sets, half of the images calibrate
    against, wanted = workplace / "against.tsv", {str(index) for index in range(count)}
    if kind == "falsify":
        succeed("certify", "digits", checkpoint, SIGMA, against, *FEW)
        wanted = {row["idx"] for row in rows(against) if float(row["radius"]) > 0}
    few = ("--max", count, *(() if kind == "sets" else ("--N", 60)), *ON)
    succeed(EVALUATIONS[kind][0], *arguments_of(kind, checkpoint, against, *few))
    assert {row["idx"] for row in rows(workplace / EVALUATIONS[kind][2])} == wanted


@pytest.mark.parametrize(
    "options",
    [
        ("--method", "sequential"),
        ("--method", "two-sided"),
        ("--method", "top-k"),
        ("--precision", "bf16"),
        ("--sound",),
        ("--fast",),
    ],
    ids=" ".join,
)
def test_certification(options, checkpoint, workplace):
    succeed("certify", "digits", checkpoint, SIGMA, "log.tsv", *FEW, *options)
    assert len(rows(workplace / "log.tsv")) == COUNT
    succeed("certify", "verify", "log.tsv", "--rows", 1, *ON)


def test_models_of_several_networks(checkpoints, workplace):
    trained = list(checkpoints.values())
    stages = [(trained[0], SIGMA), (trained[1], 0.5)]
    for number, checkpoint in enumerate(trained[:2]):
        counts = ("--max", 40, "--N", 50, "--N0", 10, "--split", "train", "--device", "cpu")
        succeed("certify", "digits", checkpoint, stages[number][1], f"{number}.log", *counts)
    learned = ("--noise", 0.2, "--epochs", 1, *QUICKLY, *ON, "--route", "0.log", "1.log")
    succeed("train", "digits", "digits_resnet8", "router", *learned)
    routed = (workplace / "router/checkpoint.pth.tar", 0.2)
    models = {
        "ensemble": ("+".join(map(str, trained[:2])), SIGMA),
        "cascade": (write_stages(workplace / "stages.toml", stages), "stages"),
        "router": (write_stages(workplace / "routed.toml", stages, router=routed), "stages"),
    }
    for name, model in models.items():
        succeed("certify", "digits", *model, f"{name}.tsv", *FEW)
        assert len(rows(workplace / f"{name}.tsv")) == COUNT


def test_a_log_is_continued_and_verified_on_its_device(checkpoint, workplace, monkeypatch, capsys):
    """Without --device, also where another device is the default."""
    about = ("digits", checkpoint, SIGMA, "log.tsv", "--N", 60, "--batch", 32)
    succeed("certify", *about, "--max", 1, "--device", "cpu")
    stand_in.become_the_default(stand_in.NAME, monkeypatch.setattr)
    succeed("certify", *about, "--max", COUNT)
    succeed("certify", "verify", "log.tsv", "--rows", COUNT)
    assert settings_of(Path("log.tsv"))["device"] == "cpu"
    assert capsys.readouterr().err.count("on the CPU, as before") == 2


def test_integers_vote_as_on_the_cpu(integers, workplace):
    for place in (stand_in.NAME, "cpu"):
        where = ("--sound", "--device", place)
        succeed("certify", "digits", integers, SIGMA, place, *FEW, *where)
    assert timeless(workplace / stand_in.NAME) == timeless(workplace / "cpu")


TRAININGS = {
    **{name: ("train", "--objective", name) for name in OBJECTIVES},
    "smoothadv": ("train_pgd", "--attack", "DDN", "--epsilon", 0.5, "--num-steps", 2),
    "distillation": ("train", "--objective", "distillation", "--teacher", CHECKPOINT),
    "cat-rs": ("train", "--objective", "cat-rs", "--teacher", CHECKPOINT, "--teacher-draws", 2),
    "denoising": ("train_denoiser",),
    "stability": ("train_denoiser", "--objective", "stability", "--classifier", CHECKPOINT),
}

# With either optimizer, a teacher, and votes on the training set.
RESUMED = ("gaussian", "denoising", "cat-rs", "acr-weakness")


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "fp32") for name in TRAININGS), ("smoothadv", "bf16"), ("stability", "bf16")],
)
def test_training(name, precision, checkpoint, workplace):
    command, *options = [checkpoint if each == CHECKPOINT else each for each in TRAININGS[name]]
    network = "digits_dncnn" if command == "train_denoiser" else "digits_resnet8"
    options += ["--noise", SIGMA, *QUICKLY, "--precision", precision, *ON]
    for further in [["--epochs", 1], ["--resume"]] if name in RESUMED else [[]]:
        succeed(command, "digits", network, "run", *options, "--epochs", 2, *further)


MODULES = {
    "parameters": lambda: nn.Sequential(nn.Flatten(), nn.Linear(IMAGES[0].numel(), CLASSES)),
    "normalized": lambda: nn.Sequential(
        nn.Conv2d(3, CLASSES, 3), nn.BatchNorm2d(CLASSES), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten()
    ),
    "buffers": lambda: nn.Sequential(nn.BatchNorm2d(3, affine=False), *MODULES["nothing"]()),
    "nothing": lambda: nn.Sequential(nn.AvgPool2d(6), nn.Flatten()),
}


@pytest.mark.parametrize(  # all pairs of two of the last three
    ("module", "of_module", "of_images", "asked"),
    [
        ("parameters", "standin", "standin", "standin"),
        ("normalized", "standin", "cpu", "cpu"),
        ("buffers", "standin", "array", "standin"),
        ("parameters", "cpu", "standin", "cpu"),
        ("normalized", "cpu", "cpu", "standin"),
        ("buffers", "cpu", "array", "cpu"),
        ("nothing", "cpu", "cpu", "standin"),
        ("nothing", "cpu", "standin", "cpu"),
    ],
)
def test_functions_of_modules_and_images(module, of_module, of_images, asked, device):
    network = MODULES[module]().to(of_module)
    images = IMAGES.numpy() if of_images == "array" else IMAGES.to(of_images)
    given = {"sigma": SIGMA, "device": asked, "n": 60}
    certified = smoothadv.certify(network, images, LABELS, n0=10, **given)
    smoothadv.certify(network, images, LABELS, n0=10, method="two-sided", **given)
    assert len(certified) == len(smoothadv.predict(network, images, LABELS, **given)) == COUNT
    attack = ATTACKS["PGD"](0.5, 2)
    attacked = smoothadv.attack(network, images, LABELS, attack=attack, num_noise_vec=2, **given)
    assert len(attacked) == COUNT
    assert all(weight.device.type == of_module for weight in network.state_dict().values())


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("of_images", ["standin", "cpu"])
def test_classes_of_modules_where_their_images_are(module, of_images, device):
    network, images = module().to(of_images), IMAGES.to(of_images)
    smooth = Smooth(network, CLASSES, SIGMA)
    smooth.certify(images[0], 10, 100, 0.1, 50)
    smooth.predict(images[0], 100, 0.1, 50)
    stream = RoundedGaussianNoise(SIGMA, 0).stream(0, of_images)
    grey = (images[0] * 255).round() / 255
    smooth.certify(grey, 10, 100, 0.1, 50, stream=stream)
    for kind in ATTACKS.values():
        attack = SmoothedAttack(kind(epsilon=0.5, num_steps=2), SIGMA, 2)
        assert attack(network, images, LABELS.to(of_images)).device.type == of_images
    moved = images.clone().requires_grad_()
    smoothed = smoothadv.SmoothedModule(network, SIGMA, 4, batch=8)
    smoothed(moved).sum().backward()
    assert moved.grad.device.type == of_images


def test_a_module_is_trained(workplace, device):
    network = MODULES["normalized"]().to(device)
    for number, images in enumerate((IMAGES, IMAGES.to(device), IMAGES.numpy())):
        how = {"outdir": str(number), "epochs": 1, "batch": 3, "device": device}
        objective = OBJECTIVES["consistency"](noise_sd=SIGMA)
        trained = smoothadv.train(network, images, LABELS, objective=objective, quiet=True, **how)
        assert len(trained.history) == 1
