"""Recipes set their options in every training command; options on the command line override
them.
"""

from pathlib import Path
from typing import Any

import pytest

from smoothadv.base.errors import DoubtfulWarning
from smoothadv.cli import train, train_pgd
from smoothadv.cli.options.recipes import RELEASED_RECIPE, recipe_names
from smoothadv.cli.options.training import training_of, with_recipes
from smoothadv.objectives import OBJECTIVES
from smoothadv.training.run import TrainingSetup
from support.commands import Outcome, call, refused
from support.trainings import read

PACKAGED = Path(__file__).parents[2] / "code/smoothadv/recipes"
DIGITS = ["digits", "digits_resnet8", "run", "--noise", 0.25, "--device", "cpu"]
COMMANDS = {
    "train": ("train", []),
    "PGD": (
        "train_pgd",
        ["--attack", "PGD", "--epsilon", "0.5", "--num-steps", 2, "--num-noise-vec", 4],
    ),
    "DDN": (
        "train_pgd",
        ["--attack", "DDN", "--epsilon", "0.5", "--num-steps", 2, "--num-noise-vec", 4],
    ),
}
ONE_STEP = ["--epochs", 1, "--steps-per-epoch", 1]


@pytest.fixture
def compose(workplace, monkeypatch, capsys):
    """Runs a command up to the training, which is left out: what it composed, or the outcome of a
    refusal.
    """
    seen: list[TrainingSetup] = []

    class Noted:
        def __init__(self, setup, folder):
            seen.append(setup)

        def run_epochs(self, report: object, board: bool) -> None:
            pass

    monkeypatch.setattr("smoothadv.training.setup.TrainingRun", Noted)
    monkeypatch.setattr("smoothadv.training.setup.provenance", lambda command: {})  # it asks git

    def run(kind: str, *options: object) -> TrainingSetup | Outcome:
        seen.clear()
        command, attack = COMMANDS[kind]
        outcome = call(capsys, command, *DIGITS, *attack, *options)
        assert bool(seen) == (outcome.code == 0) or "usage: " in outcome.out
        return seen[0] if seen else outcome

    return run


def write_recipe(text: str) -> str:
    """Writes a user's recipe into the working folder and returns its name."""
    Path("mine.txt").write_text(text)
    return "mine.txt"


def with_epsilon(options: list, number: int) -> list:
    """The options with another value of --epsilon."""
    place = options.index("--epsilon") + 1
    return [*options[:place], number, *options[place + 1 :]]


def assert_refused(outcome: Any, *words: str) -> None:
    assert isinstance(outcome, Outcome), "it was accepted"
    assert any(refused(outcome, *words, code=code) for code in (1, 2)), outcome


def test_packaged_recipes_are_known_by_their_names():
    """The recipe of the released behaviour has a separate option, since it also changes the unit of
    epsilon.
    """
    assert sorted([*recipe_names(), RELEASED_RECIPE]) == sorted(
        path.stem for path in PACKAGED.glob("*.txt")
    )
    assert set(recipe_names()) >= {
        "fast",
        "paper-cifar10",
        "paper-finetune",
        "paper-imagenet",
        "smoke",
    }


PAPER = [
    ("paper-cifar10", (150, 256, 0.1, 50, 0.1), 10),
    ("paper-imagenet", (90, 400, 0.1, 30, 0.1), 10),
    ("paper-finetune", (30, 256, 0.001, 30, 0.1), 0),
]


@pytest.mark.parametrize(("name", "values", "warmup"), PAPER, ids=[case[0] for case in PAPER])
def test_paper_recipes_have_the_values_of_the_paper(compose, name, values, warmup):
    """Appendices D and E.1: epochs, batch, learning rate, epochs between its divisions, factor."""
    for kind in COMMANDS:
        composed = compose(kind, "--recipe", name)
        schedule = composed.schedule
        found = (
            schedule.epochs,
            schedule.batch,
            schedule.learning_rate,
            schedule.learning_rate_step,
        )
        assert (*found, schedule.learning_rate_factor) == values
        assert (schedule.momentum, schedule.weight_decay, schedule.learning_rate_shape) == (
            0.9,
            1e-4,
            "step",
        )
        assert kind == "train" or composed.spec.objective.warmup == warmup
        rates = {schedule.learning_rate_at(epoch, 0, 1) for epoch in range(schedule.epochs)}
        assert len(rates) == -(-schedule.epochs // schedule.learning_rate_step)


@pytest.mark.parametrize(
    ("line", "words", "part", "field", "value"),
    [
        ("--momentum 0.8", ["--momentum", 0.9], "schedule", "momentum", 0.9),
        ("--weight-decay 0.1", ["--weight-decay", 0], "schedule", "weight_decay", 0),
        ("--lr 7", ["--lr", 0.1], "schedule", "learning_rate", 0.1),
        ("--lr-factor 0.2", ["--gamma", 0.1], "schedule", "learning_rate_factor", 0.1),
        ("--lr-step-size 3", ["--lr_step_size", 20], "schedule", "learning_rate_step", 20),
        (
            "--lr-schedule one-cycle",
            ["--lr-schedule", "step"],
            "schedule",
            "learning_rate_shape",
            "step",
        ),
        ("--epochs 7", ["--epochs", 60], "schedule", "epochs", 60),
        ("--batch 7", ["--batch", 128], "schedule", "batch", 128),
        ("--warmup 3", ["--warmup", 10], "objective", "warmup", 10),
        ("--num-noise-vec 7", ["--num-noise-vec", 1], "objective", "num_noise_vec", 1),
        ("--noise 0.5", [], "objective", "noise_sd", 0.25),
        ("--precision bf16", ["--precision", "fp32"], "execution", "precision", "fp32"),
        (
            "--checkpoint-minutes 3",
            ["--checkpoint-minutes", 10],
            "execution",
            "checkpoint_minutes",
            10,
        ),
        ("--evaluate-every 3", ["--evaluate-every", 1], "tests", "every", 1),
        ("--objective gaussian", ["--objective", "smoothadv"], "objective", "warmup", 10),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("--") else "",
)
def test_command_line_wins_even_where_it_states_a_default(compose, line, words, part, field, value):
    composed = compose("PGD", "--recipe", write_recipe(line), *words)
    assert not isinstance(composed, Outcome), composed.err
    assert getattr(getattr(composed.spec, part), field) == value


def test_own_file_is_a_recipe(compose):
    text = (
        "# mine\n--lr 0.05 --batch 64 # two in a line\n\n  --crop-padding "
        "'1'\n--horizontal-flip\n--warmup 4\n"
    )
    composed = compose("DDN", "--recipe", write_recipe(text))
    assert (
        composed.schedule.learning_rate,
        composed.schedule.batch,
        composed.spec.objective.warmup,
    ) == (0.05, 64, 4)


@pytest.mark.parametrize(
    ("command", "content"),
    [
        ("train_pgd", "--attack PGD\n--epsilon 0.5\n--num-steps 3\n--warmup 7"),
        ("train_pgd", "--warmup 7\n--num-steps 3\n--epsilon 0.5\n--attack PGD"),
        ("train", "--objective smoothadv --attack PGD --epsilon 0.5 --num-steps 3 --warmup 7"),
    ],
    ids=["attack", "attack last", "objective"],
)
def test_recipe_may_hold_objective_and_attack_with_their_settings(
    workplace, capsys, command, content
):
    outcome = call(capsys, command, *DIGITS, "--recipe", write_recipe(content), *ONE_STEP)
    assert outcome.code == 0, outcome.err
    objective = read(workplace / "run")["recipe"]["objective"]
    attack = objective["attack"]
    assert (attack["name"], attack["epsilon"], attack["num_steps"], objective["warmup"]) == (
        "PGD",
        0.5,
        3,
        7,
    )


def test_unknown_recipe_is_refused_with_those_that_there_are(compose, workplace):
    """So is a file that is not text."""
    (workplace / "binary").write_bytes(b"\xff\xfe\x00\x01")
    for name in ("papercifar", "binary", str(workplace)):
        assert_refused(compose("train", "--recipe", name), name, *recipe_names())


NO_PART = [
    "--epoks 3",
    "cifar10",
    "--seed 3",
    "--seed 0",
    "--resume",
    "--overwrite",
    "--recipe fast",
    "--help",
    "--released-behaviour",
    "--device cpu",
    "--data-dir /tmp",
    "--debug",
    "images --lr 0.1",
]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((content, [content.split()[0]]) for content in NO_PART),
        ("--lr banana", ["--lr", "banana"]),
        ("--lr", ["--lr"]),
        ("--epsilon 64", ["64/255"]),
        ("--lr 'no end", []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_part_of_a_recipe_is_refused_by_its_name(compose, workplace, content, words):
    write_recipe(content)
    assert_refused(compose("PGD", "--recipe", "mine.txt"), "mine.txt", *words)
    assert not (workplace / "run").exists()


def test_settings_that_nobody_reads_are_left_out_of_recipes_but_refused_as_options(compose):
    """A recipe may serve several objectives and attacks, but an option that a user types is
    meant.
    """
    path = write_recipe(
        "--warmup 3 --init-norm-DDN 2 --random-start --epsilon 0.25 --num-noise-vec 2"
    )
    assert compose("train", "--recipe", path).spec.objective.noise_sd == 0.25
    pgd, ddn = (
        compose("PGD", "--recipe", path).spec.objective,
        compose("DDN", "--recipe", path).spec.objective,
    )
    assert (pgd.warmup, pgd.attack.random_start, pgd.attack.epsilon) == (3, True, 0.5)
    assert (ddn.warmup, ddn.attack.initial_norm, ddn.attack.epsilon) == (3, 2.0, 0.5)
    assert_refused(compose("train", "--warmup", 2), "--warmup")
    assert_refused(compose("PGD", "--recipe", path, "--init-norm-DDN", 2), "--init-norm-DDN")
    assert_refused(compose("DDN", "--recipe", path, "--random-start"), "--random-start")


@pytest.mark.parametrize("attack", ["PGD", "DDN"])
@pytest.mark.parametrize(("epsilon", "norm"), [(64, 0.25), (127, 0.49609375)])
def test_released_behaviour_counts_in_256ths(compose, monkeypatch, attack, epsilon, norm):
    command, options = COMMANDS[attack]
    monkeypatch.setitem(COMMANDS, attack, (command, with_epsilon(options, epsilon)))
    composed = compose(attack, "--released-behaviour")
    objective = composed.spec.objective
    assert objective.attack.epsilon == norm and objective.warmup_from_first_epoch
    assert attack == "DDN" or objective.attack.random_if_flat
    assert composed.schedule.batch == 128 // 4, "an update for each of the four draws"


def test_released_behaviour_goes_with_a_recipe_and_the_command_line_wins_over_both(
    compose, monkeypatch
):
    monkeypatch.setitem(COMMANDS, "PGD", ("train_pgd", with_epsilon(COMMANDS["PGD"][1], 128)))
    options = ["--released-behaviour", "--recipe", "paper-cifar10", "--epochs", 9]
    composed = compose("PGD", *options)
    attack = composed.spec.objective.attack
    assert (attack.epsilon, attack.random_if_flat) == (0.5, True)
    assert (composed.schedule.epochs, composed.schedule.batch) == (9, 64)
    assert composed.spec.objective.epsilon(9) == attack.epsilon > composed.spec.objective.epsilon(8)


def test_without_it_nothing_of_the_released_behaviour_is_on(compose):
    for kind in ("PGD", "DDN"):
        objective = compose(kind).spec.objective
        assert not objective.warmup_from_first_epoch and objective.epsilon(0) == 0
        assert not getattr(objective.attack, "random_if_flat", False)
        assert_refused(compose(kind, "--epsilon", 64), "--epsilon", "64")
        # 0.25 would be an attack of about 0.001 where 256ths are counted.
        in_256ths = compose(kind, "--released-behaviour", "--epsilon", 0.25)
        assert_refused(in_256ths, "--epsilon", "1/256")
    assert compose("train", "--released-behaviour").schedule.batch == 128, (
        "it serves Gaussian augmentation, too"
    )


FT_CADIS = ["--recipe", "ft-cadis-cifar10", "--resize", 8]


@pytest.mark.parametrize(
    ("options", "flag", "recipe"),
    [
        ([*FT_CADIS, "--epochs", 2], "--lr-rise", "ft-cadis-cifar10"),
        (["--recipe", "fast", "--lr-factor", 1], "--lr-schedule", "fast"),
        (["--recipe", "router"], "--route-consistency", "router"),
        (
            "--released-behaviour --objective smoothadv --attack PGD --epsilon 128 --num-steps 1 "
            "--num-noise-vec 4 --batch 3".split(),
            "--split-updates",
            RELEASED_RECIPE,
        ),
    ],
)
def test_refusal_says_last_which_options_are_of_a_recipe(compose, options, flag, recipe):
    assert_refused(compose("train", *options), f"; {flag} is of the recipe {recipe} (see ")


@pytest.mark.parametrize(
    ("recipe", "shape", "left_out"),
    [
        ("--lr-schedule cosine --lr-rise 2", "step", "rise"),
        ("--lr-schedule cosine --lr-end 0.01", "one-cycle", "end"),
        ("--lr-step-size 3", "one-cycle", "step"),
        ("--lr-factor 0.2", "cosine", "factor"),
    ],
)
def test_recipe_leaves_out_what_another_schedule_lacks(compose, recipe, shape, left_out):
    composed = compose("train", "--recipe", write_recipe(recipe), "--lr-schedule", shape)
    assert getattr(composed.spec.schedule, f"learning_rate_{left_out}") is None


@pytest.mark.parametrize(
    ("recipe", "optimizer", "rate"),
    [
        ("--optimizer adamw --lr 0.002 --layer-decay 0.75", "sgd", 0.1),
        ("--optimizer adamw --lr 0.002", "adamw", 0.002),
        ("--lr 0.2", "sgd", 0.2),
    ],
)
def test_recipe_has_the_learning_rate_of_its_own_optimizer(compose, recipe, optimizer, rate):
    composed = compose("train", "--recipe", write_recipe(recipe), "--optimizer", optimizer)
    assert composed.schedule.learning_rate == rate


@pytest.mark.parametrize(
    ("batch", "copies", "each"), [(256, 8, 32), (10, 4, 2), (4, 4, 1), (128, 1, 128)]
)
def test_split_updates_divide_the_batch_by_the_number_of_draws(compose, batch, copies, each):
    composed = compose("PGD", "--split-updates", "--batch", batch, "--num-noise-vec", copies)
    assert composed.schedule.batch == each and composed.spec.objective.copies == copies
    if copies > 1:
        too_few = compose(
            "PGD", "--split-updates", "--batch", copies - 1, "--num-noise-vec", copies
        )
        assert_refused(too_few, "--split-updates", "--batch")


@pytest.mark.parametrize(
    ("words", "flag", "estimator"),
    [
        ("--gradient stein", "--gradient", "Stein"),
        ("--gradient hard-stein", "--gradient", "Stein"),
        ("--beta 2", "--beta", "PlugIn"),
    ],
)
def test_recipe_says_how_attacks_compute_gradients(workplace, words, flag, estimator):
    Path("gradients.txt").write_text(f"{words}\n")
    parser = train_pgd.make_parser([])
    line = "digits digits_resnet8 run --noise 0.25 --attack PGD --epsilon 1 --num-steps 2 --recipe"
    given = vars(parser.parse_args([*line.split(), "gradients.txt"]))
    with training_of(parser, given, ["smoothadv", "train_pgd"]) as spec:
        assert type(spec.objective.gradient_attack.estimator).__name__ == estimator
    parser, line = train.make_parser([]), "digits digits_resnet8 run --noise 0.25 --recipe"
    with pytest.warns(DoubtfulWarning, match=f"nothing reads {flag} .*--attack"):
        with_recipes(parser, vars(parser.parse_args([*line.split(), "gradients.txt"])), "train")


def test_objective_is_that_of_the_command_where_denoisers_have_one_of_its_name():
    parser = train.make_parser([])
    words = "digits digits_resnet8 run --noise 0.25 --objective stability".split()
    with training_of(parser, vars(parser.parse_args(words)), ["smoothadv", "train"]) as spec:
        assert type(spec.objective) is OBJECTIVES["stability"]
