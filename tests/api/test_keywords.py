"""Every keyword of the Python face with what callers mistype, and arguments of its functions and
classes that cannot be: one line that names it, before anything is written.
"""

import math
from dataclasses import MISSING, fields, replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import smoothadv
from smoothadv.attacks import ATTACKS, SmoothedAttack
from smoothadv.attacks.estimators import PlugIn, Stein
from smoothadv.attacks.pgd import PGD
from smoothadv.base.errors import NonFiniteError, UserError
from smoothadv.base.settings import options_of
from smoothadv.datasets import describe_dataset
from smoothadv.datasets.images import InMemoryImages
from smoothadv.evaluation.specs import CertifySpec
from smoothadv.objectives import OBJECTIVES, DataPolicy
from smoothadv.objectives.denoising import DENOISING
from smoothadv.objectives.gaussian import Gaussian
from smoothadv.objectives.smoothadv import SmoothAdv
from smoothadv.statistics import PROCEDURES, Smoothing
from smoothadv.training.spec import EvaluationSchedule, Execution, ScheduleSpec

NO_NUMBERS = [
    *(
        True,
        math.nan,
        math.inf,
        "5",
        "x",
        "",
        b"5",
        [1],
        {},
        1j,
        object(),
        10**6000,
        np.array([1, 2]),
    ),
    *(torch.tensor(math.nan), np.ma.masked, np.True_, Fraction(1, 3) + 2**1025),
]
OTHER = [*NO_NUMBERS, -1]
SIZE = [*OTHER, -0.5]
POSITIVE = [*SIZE, 0]
INSIDE = [*POSITIVE, 1]
WHOLE = [*OTHER, 1.5]
COUNT = [*WHOLE, 0, 2**70]
UP_TO_A_MILLION = [*COUNT, 1_000_001]
NAME = [True, math.nan, -1, 10**6000, b"x", [1], {}, object()]
CHOICE = [*NAME, "x", "", None]
SWITCH = [*NO_NUMBERS[1:-2], 0, 1, None]
FOLDER = [*NAME, ""]
SHARED = {
    **{
        "sigma": [*POSITIVE, 10.1],
        "alpha": INSIDE,
        "n": COUNT,
        "seed": [*WHOLE, 2**128],
        "skip": COUNT,
        "limit": COUNT,
    },
    **{
        "batch": UP_TO_A_MILLION,
        "num_classes": UP_TO_A_MILLION,
        "split": CHOICE,
        "precision": CHOICE,
        "existing": CHOICE,
    },
    **{
        "input_layer": CHOICE[:-1],
        "pretrained": SWITCH,
        "compile": SWITCH,
        "name": NAME,
        "data_dir": NAME,
    },
    **{"denoiser": NAME, "device": [*NAME[1:], 2**70, "", "x"]},
    **{"timestep": [*CHOICE[:-1], 1.5], "resize": [*CHOICE[:-1], 0, 1.5, 4097, "8:area"]},
    "local_noise": [*CHOICE[:-1], 0, 11, "0.1:0", "0.1:1001"],
}
ATTACKED = {"num_noise_vec": UP_TO_A_MILLION, "restarts": COUNT, "attack_batch": UP_TO_A_MILLION}
KEYWORDS = {
    "certify": {
        **SHARED,
        "n0": COUNT,
        "method": NAME,
        "settings": [5, [], "x", True],
        "sound": SWITCH,
        "log": [*FOLDER, "/"],
    },
    "predict": {**SHARED, **ATTACKED, "base_attack": SWITCH, "top_k": [*COUNT[:-1], None]},
    "predict clean": {
        "num_noise_vec": [8],
        "restarts": [5],
        "base_attack": [True],
        "target": [1],
        "attack_batch": [4],
    },
    "attack": {
        **{
            **ATTACKED,
            "base_attack": SWITCH,
            "outdir": FOLDER,
            "attack": OTHER,
            "target": [-1, 10**6000, -(10**6000), 1.5, True, "cat", "", [1], {}, np.array([1, 2])],
        },
        "epsilons": [
            "12",
            "",
            b"1",
            True,
            {0.5: 1},
            *([one] for one in SIZE),
            [64],
        ],
    },
    "falsify": {
        **ATTACKED,
        "against": NAME,
        "fraction": INSIDE,
        "false_alarm": INSIDE,
        "outdir": FOLDER,
    },
    "train": {
        **{
            "num_classes": UP_TO_A_MILLION,
            "seed": SHARED["seed"],
            "existing": CHOICE,
            "quiet": SWITCH,
            "data_dir": NAME,
        },
        **{
            "schedule": [5, [], "x", True],
            "execution": OTHER,
            "tests": OTHER,
            "policy": OTHER,
        },
        **{
            "crop_padding": [*WHOLE, -3],
            "horizontal_flip": SWITCH[:-1],
            "teacher_draws": COUNT,
            "teacher_noise": POSITIVE,
            "outdir": FOLDER,
        },
        **{
            "unlabelled_weight": POSITIVE,
            "pretrained": SWITCH,
            "finetune_quantized": SWITCH,
            "teacher": NAME,
        },
        **{"use_unlabelled": NAME, "pretrained_model": NAME, "input_layer": CHOICE[:-1]},
    },
}
CLEAN = {"sigma": 0.25, "n": 20, "device": "cpu"}
USUAL = {
    **{
        "certify": CLEAN,
        "predict clean": CLEAN,
        **dict.fromkeys(("predict", "attack"), {**CLEAN, "attack": PGD(0.5, 1)}),
    },
    "falsify": {**CLEAN, "attack": PGD(0.5, 1), "against": "log.tsv"},
    "train": {
        "objective": SmoothAdv(PGD(0.5, 1), 0.25, warmup=0),
        "device": "cpu",
        "quiet": True,
        "outdir": "run",
    },
}
LISTS = [NO_NUMBERS, *([each] for each in OTHER)]
# By whether a setting is a switch, and takes several values.
WRONG = {(True, False): SWITCH, (False, False): OTHER, (False, True): LISTS}
FIELDS = [
    *(
        (ScheduleSpec, name, COUNT)
        for name in ("epochs", "batch", "learning_rate_step", "micro_batch")
    ),
    *(
        (ScheduleSpec, name, POSITIVE)
        for name in ("learning_rate", "learning_rate_factor", "layer_decay")
    ),
    *((ScheduleSpec, "momentum", [*SIZE, 1, 7]), (ScheduleSpec, "weight_decay", SIZE)),
    *((ScheduleSpec, name, CHOICE[:-1]) for name in ("learning_rate_shape", "optimizer")),
    *((ScheduleSpec, "steps_per_epoch", COUNT), (ScheduleSpec, "split_updates", SWITCH)),
    *((Execution, "precision", [*CHOICE, "fp16"]), (Execution, "compile", SWITCH)),
    *((Execution, "synchronized_norm", SWITCH), (Execution, "checkpoint_minutes", POSITIVE)),
    *(
        (Execution, "cuda_graph", SWITCH[:-1]),
        (EvaluationSchedule, "every", COUNT),
        (EvaluationSchedule, "images", COUNT),
    ),
    *((DataPolicy, name, WHOLE) for name in ("from_epoch", "resample_every")),
    *((DataPolicy, name, COUNT) for name in ("drop_draws", "resample_draws")),
    *(
        (DataPolicy, "drop_below", [*SIZE, 1.1]),
        (PlugIn, "beta", POSITIVE),
        (Stein, "sigma", [*POSITIVE, 11]),
    ),
    *(
        (Stein, "hard", SWITCH),
        (PGD, "targeted", SWITCH),
        (PGD, "estimator", OTHER),
        (SmoothAdv, "attack", [*OTHER, None]),
    ),
    *(
        (
            kind,
            one.field,
            WRONG[one.parse is None, bool(one.many)],
        )
        for registry in (ATTACKS, OBJECTIVES, DENOISING, PROCEDURES)
        for kind in registry.values()
        for one in options_of(kind)
    ),
]


NEEDED = {
    **{
        "noise_sd": 0.25,
        "epsilon": 0.5,
        "num_steps": 2,
        "attack": PGD(0.5, 1),
        "from_epoch": 1,
        "beta": 1,
        "sigma": 1,
    },
    "smoothing": Smoothing(0.25, 1, 9, 0.1),
}


def call(function: str, model: nn.Module | None = None, **options):
    """``smoothadv.function`` of four images, with few draws, and ``options``."""
    images = np.random.default_rng(0).integers(256, size=(4, 1, 6, 6)).astype(
        np.float32
    ) / np.float32(255)
    model = model or nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    return getattr(smoothadv, function.split()[0])(
        model, images, [0, 1, 0, 1], **{**USUAL[function], **options}
    )


def made(kind: type, **given):
    """A dataclass with the fields ``given``, and usual ones where it needs some."""
    return kind(
        **{
            **{one.name: NEEDED[one.name] for one in fields(kind) if one.default is MISSING},
            **given,
        }
    )


CASES = {
    **{
        f"{name} {each}": (partial(call, name), each, KEYWORDS[name][each])
        for name in KEYWORDS
        for each in KEYWORDS[name]
    },
    **{
        f"{kind.__name__} {each} {len(wrong)}": (partial(made, kind), each, wrong)
        for kind, each, wrong in FIELDS
    },
}


@pytest.mark.parametrize(("make", "keyword", "wrong"), CASES.values(), ids=CASES)
def test_keywords_take_what_the_options_of_the_commands_take(make, keyword, wrong, workplace):
    for value in wrong:
        with pytest.raises(UserError, match=f"^{keyword}: found [^\n]{{1,400}}$"):
            make(**{keyword: value})
    assert not list(workplace.iterdir())


def test_numbers_of_other_kinds_become_pythons():
    attack = PGD(np.float32(0.5), torch.tensor(3), step_size=Fraction(1, 4), random_start=np.True_)
    assert repr(attack) == repr(PGD(0.5, 3, step_size=0.25, random_start=True))
    assert ScheduleSpec(epochs=1e2, micro_batch=None, momentum=0) == ScheduleSpec(
        epochs=100, momentum=0.0
    )
    limits = {"sigma": 10, "seed": 2**128 - 1, "n": 4e9, "batch": 10**6, "limit": None}
    assert (
        CertifySpec(model=nn.Flatten(), dataset="digits", log="log.tsv", **limits).n
        == 4_000_000_000
    )
    assert (
        made(DataPolicy, from_epoch=0, drop_below=1)
        and made(Stein, sigma=10)
        and made(PGD, epsilon=0, num_steps=1)
    )
    assert replace(attack) == attack and PGD(99, 1).epsilon == 99, (
        "in Python an attack may have all of the space"
    )


class Detach(nn.Module):
    """Keeps gradients from what comes before it."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.detach()


NAN, INF, CUT, BEGUN_ANEW = (
    *(
        lambda model, value=value: nn.init.constant_(model[1].weight, value)
        for value in (math.nan, math.inf)
    ),
    lambda model: model.insert(0, Detach()),
    lambda model: model.register_forward_pre_hook(
        lambda module, given: given[0].detach().requires_grad_()
    ),
)


@pytest.mark.parametrize(
    ("function", "fault", "options", "error"),
    [
        *(
            (name, fault, {}, NonFiniteError)
            for name in ("certify", "predict clean", "predict")
            for fault in (NAN, INF)
        ),
        *(("certify", fault, {"sound": True}, NonFiniteError) for fault in (NAN, INF)),
        *((name, CUT, {}, UserError) for name in ("predict", "attack", "train")),
        ("attack", BEGUN_ANEW, {}, UserError),
        (
            "train",
            CUT,
            {"objective": OBJECTIVES["acr-weakness"](0.25, attack_from_epoch=0)},
            UserError,
        ),
    ],
)
def test_models_that_cannot_be_used_are_named_as_such(function, fault, options, error, workplace):
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    fault(model)
    with pytest.raises(
        error,
        match="not finite"
        if fault in (NAN, INF)
        else "no gradient with respect to the images: .*Stein",
    ):
        call(function, model, **options)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        *(
            (function, {"base_attack": True, "num_noise_vec": 8}, "num_noise_vec is not read by .*")
            for function in ("predict", "attack")
        ),
        *((function, {"attack": None}, "attack: found None") for function in ("attack", "falsify")),
        ("certify", {"timestep": 3}, "^timestep is for a diffusion model"),
        ("predict", {"top_k": 10**9}, "top_k 1000000000: give a number below"),
        ("train", {"schedule": {"epochs": 1}, "epochs": 2}, "epochs: found it in schedule too"),
    ],
)
def test_keywords_that_contradict_each_other_are_refused(function, options, message):
    with pytest.raises(UserError, match=message):
        call(function, **options)


def test_epsilons_of_none_are_that_of_the_attack(checkpoints):
    keywords = {**CLEAN, "limit": 1, "num_noise_vec": 1, "epsilons": None}
    found = smoothadv.attack(checkpoints["gaussian"], "digits", attack=PGD(0.5, 1), **keywords)
    assert found.epsilon.tolist() == [0.5]


MODEL = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
IMAGES = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(4)
LEVELS = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
DIGITS = describe_dataset("digits")


def attacked(inputs=IMAGES, labels=LABELS, attack=None):
    return SmoothedAttack(attack or PGD(0.5, 2), 0.25, 2)(MODEL, inputs, labels)


def smoothed(image, model=MODEL):
    return smoothadv.Smooth(model, 10, 0.25).certify(image, 10, 50, 0.001, 50)


ARGUMENTS = {
    "attack of an array": (lambda: attacked(IMAGES.numpy()), "inputs: found a ndarray of float32"),
    "attack of a number": (lambda: attacked(torch.tensor(0.5)), "inputs: found tensor"),
    "labels in a list": (lambda: attacked(labels=[0, 1, 2, 3]), "labels: found .0, 1, 2, 3."),
    "one label": (lambda: attacked(labels=LABELS[0]), "labels: found tensor"),
    "labels of floats": (lambda: attacked(labels=LABELS.float()), "labels: found a Tensor of"),
    "images of doubles": (
        lambda: attacked(IMAGES.double()),
        r"Sequential cannot be applied to images of shape \[1, 8, 8\], float64",
    ),
    "name of an attack": (lambda: attacked(attack="PGD"), "attack: found 'PGD', expected an obj"),
    "sigma in text": (lambda: smoothadv.Smooth(MODEL, 10, "0.25"), "sigma: found '0.25', expected"),
    "large sigma": (lambda: smoothadv.Smooth(MODEL, 10, 64), "sigma: found 64, expected a stand"),
    "classes in text": (lambda: smoothadv.Smooth(MODEL, "10", 0.25), "num_classes: found '10'"),
    "path of an image": (lambda: smoothed("cat.png"), "x is a str: give one image"),
    "weights of doubles": (
        lambda: smoothed(IMAGES[0], nn.Sequential(nn.Flatten(), nn.Linear(64, 10).double())),
        "Sequential cannot be applied to images of shape .*: call its .float()",
    ),
    "images of floats": (
        lambda: InMemoryImages(IMAGES, LABELS, DIGITS),
        "images of digits: found a Tensor of torch.float32, .*, expected grey levels",
    ),
    "images of another size": (
        lambda: InMemoryImages(LEVELS[:, :, 1:], LABELS[:3], DIGITS),
        r"images of digits: .*\[3, 1, 7, 8\], expected grey levels .* \[N, 1, 8, 8\]",
    ),
    "labels for other images": (
        lambda: InMemoryImages(LEVELS, LABELS, DIGITS),
        r"labels of digits: found .* \[4\], expected int64 \[3\]",
    ),
    "label of no class": (
        lambda: InMemoryImages(LEVELS, torch.tensor([0, 10, 3]), DIGITS),
        "labels of digits: found 0 to 10, expected 0 to 9",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_argument_that_cannot_be_is_one_line(name):
    call, words = ARGUMENTS[name]
    with pytest.raises((UserError, ValueError), match=rf"\A{words}[^\n]*\Z"):
        call()


class OneMemory(nn.Module):
    """The logits of a module, in the same tensor each time."""

    def forward(self, images):
        logits = MODEL(images)
        self.found = getattr(self, "found", torch.empty_like(logits)).detach().copy_(logits)
        return self.found


def test_passes_whose_logits_share_memory_count_apart():
    attack = SmoothedAttack(PGD(0.5, 2), 0.25, 6, batch=4)
    shares = attack.shares(MODEL, IMAGES, LABELS)
    assert shares.equal(attack.shares(OneMemory(), IMAGES, LABELS))


def test_images_with_strides_backwards_are_those_in_order():
    backwards = IMAGES[0].numpy()[:, :, ::-1]
    torch.manual_seed(1)
    found = smoothed(backwards)
    torch.manual_seed(1)
    assert found == smoothed(np.ascontiguousarray(backwards))


@pytest.mark.parametrize(
    "call",
    [
        lambda path: smoothadv.certify(MODEL, IMAGES, LABELS, sigma=0.25, n=20, log=path / "a.tsv"),
        lambda path: smoothadv.attack(
            MODEL, IMAGES, LABELS, sigma=0.25, attack=PGD(0.5, 2), epsilons=[0.5], outdir=path
        ),
        lambda path: smoothadv.train(MODEL, IMAGES, LABELS, objective=Gaussian(0.25), outdir=path),
    ],
    ids=["certify", "attack", "train"],
)
def test_folder_below_a_file_is_one_line(tmp_path, call):
    path = tmp_path / "file"
    path.touch()
    for folder in (path, path / "below"):
        with pytest.raises(UserError, match=r"\A.*file.*: this is a file: name a folder\Z"):
            call(folder)
