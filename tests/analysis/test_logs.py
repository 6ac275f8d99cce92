"""Logs are found in files, folders, globs and named groups; what cannot be trusted is never passed
over silently.
"""

import errno
import glob
import json
import os
from pathlib import Path

import pytest

from smoothadv.analysis.logs import Logs, groups_of
from smoothadv.analysis.reading import read_logs
from smoothadv.records.logs import manifest_path
from support import refusals
from support.analyzed_folder import certification

HEADER = "idx\tlabel\tpredict\tradius\tcorrect\ttime"
CERTIFICATION = f"{HEADER}\n0\t3\t3\t0.5\t1\t0:00:15\n20\t7\t-1\t0.0\t0\t0:00:15\n"
PREDICTION = "idx\tlabel\tpredict\tbasePredict\tcorrect\ttime\n0\t3\t3\t2\t1\t0:00:03\n"
TRAINING = (
    "epoch\ttime\tlr\ttrain loss\ttrain acc\ttestloss\ttest "
    "acc\n0\t1\t0.1\t1.99\t26.5\t1.83\t32.7\n"
)
IMPOSSIBLE = CERTIFICATION.replace("0.5", "3.5")
KINDS = ("certification", "prediction", "training")
MANIFEST = json.dumps({"settings": {"sigma": 0.25, "N": 1000, "alpha": 0.001}, "runs": []})


def put(name: str, content: str | bytes = CERTIFICATION) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(*arguments: str, kinds=("certification",), **stated) -> tuple[Logs, list[str]]:
    warnings: list[str] = []
    return read_logs(
        [str(argument) for argument in arguments], kinds, stated, warnings.append
    ), warnings


def refusal(*arguments: str, kinds=("certification",)) -> tuple[str, list[str]]:
    """The error and the warnings before it."""
    warnings: list[str] = []
    return refusals.refusal(read_logs, [*map(str, arguments)], kinds, {}, warnings.append), warnings


def found(*arguments: str) -> list[tuple[str, str]]:
    """Group and path of each log, where there is nothing to warn of."""
    logs, warnings = read(*arguments)
    assert warnings == [] and logs.left_out == []
    return [(log.group, str(log.path)) for log in logs.certification]


def names(*arguments: str) -> list[str]:
    return [log.name for log in read(*arguments)[0].certification]


@pytest.fixture
def tree(workplace) -> None:
    for name in ("a/sigma_0.25", "a/deep/sigma_0.50", "b/sigma_0.25"):
        put(name)
    put("a/stdout.txt", "Files already downloaded and verified\n")
    put("b/predictions", PREDICTION)
    put("b/log.txt", TRAINING)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["a/sigma_0.25"], [("", "a/sigma_0.25")]),
        (["a"], [("a", "a/deep/sigma_0.50"), ("a", "a/sigma_0.25")]),
        (["./a/"], [("a", "a/deep/sigma_0.50"), ("a", "a/sigma_0.25")]),
        (["*/sigma_0.25"], [("*/sigma_0.25", "a/sigma_0.25"), ("*/sigma_0.25", "b/sigma_0.25")]),
        (["b*"], [("b*", "b/sigma_0.25")]),
        (["a/**/sigma_0.50"], [("a/**/sigma_0.50", "a/deep/sigma_0.50")]),
        (["Cohen=a/sigma_0.25"], [("Cohen", "a/sigma_0.25")]),
        (["Cohen=a"], [("Cohen", "a/deep/sigma_0.50"), ("Cohen", "a/sigma_0.25")]),
        (["A b=*/sigma_0.25"], [("A b", "a/sigma_0.25"), ("A b", "b/sigma_0.25")]),
        (["X=a/deep", "Y=b"], [("X", "a/deep/sigma_0.50"), ("Y", "b/sigma_0.25")]),
        (["b", "a/deep"], [("b", "b/sigma_0.25"), ("a/deep", "a/deep/sigma_0.50")]),
        (["b/sigma_0.25", "b"], [("", "b/sigma_0.25")]),
    ],
)
def test_files_folders_globs_and_groups(tree, arguments, expected):
    assert found(*arguments) == expected


@pytest.mark.parametrize(
    "file, argument, group",
    [
        ("lr=0.1.tsv", "lr=0.1.tsv", ""),
        ("lr=0.1/sigma_0.25", "lr=0.1/sigma_0.25", ""),
        ("lr=0.1/sigma_0.25", "lr=0.1", "lr=0.1"),
        ("lr=0.1/sigma_0.25", "lr=*", "lr=*"),
        ("lr=0.1/sigma_0.25", "G=lr=0.1", "G"),
        ("lr=0.1/sigma_0.25", "G=lr=0.1/sigma_0.25", "G"),
        ("lr=0.1/sigma_0.25", "G=lr=*/*", "G"),
        ("=.tsv", "=.tsv", ""),
        ("=/sigma_0.25", "G==/sigma_0.25", "G"),
    ],
)
def test_equals_signs_in_file_names_are_no_groups(workplace, file, argument, group):
    put(file)
    logs, _ = read(argument, sigma=0.25)
    assert [(log.group, str(log.path)) for log in logs.certification] == [(group, file)]


def test_a_log_that_two_groups_name_is_in_both(tree):
    assert found("A=b/sigma_0.25", "B=b") == [("A", "b/sigma_0.25"), ("B", "b/sigma_0.25")]
    assert len(set(names("A=b/sigma_0.25", "B=b"))) == 2
    assert found("A=b/sigma_0.25", "A=b") == [("A", "b/sigma_0.25")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(
            (["a", argument], argument.split("=")[-1])
            for argument in ["nowhere", "nowhere/*", "G=nowhere", "=", ""]
        ),
        (["none"], "none: holds no certification log (a file that starts with idx"),
        (["empty", "none"], "empty none: holds no"),
    ],
)
def test_what_matches_nothing_is_an_error_that_says_what_a_log_is(tree, arguments, words):
    put("none/stdout.txt", "verified\n")
    Path("empty").mkdir()
    assert words in refusal(*arguments)[0]


def test_logs_go_to_their_kind_and_other_kinds_in_folders_are_passed_over(tree):
    logs, warnings = read(".", kinds=KINDS)
    assert [len(logs.certification), len(logs.prediction), len(logs.training)] == [3, 1, 1]
    assert warnings == [] and logs.left_out == []
    (prediction,), (training,) = logs.prediction, logs.training
    assert prediction.table.correct.tolist() == [1] and training.table.test_loss.tolist() == [1.83]
    for kind in KINDS:
        logs, warnings = read(".", kinds=(kind,))
        assert [name for name in KINDS if getattr(logs, name)] == [kind] and warnings == []


@pytest.mark.parametrize("file, kind", [("b/predictions", "prediction"), ("b/log.txt", "training")])
def test_a_file_of_another_kind_that_was_named_is_told(tree, file, kind):
    needed = f"{file} is a {kind} log; what is needed here is a certification log; for {kind}"
    assert refusal(file)[0].startswith(needed)
    logs, (warning,) = read(file, "a/sigma_0.25")
    assert warning.startswith(f"{file} is a {kind} log") and len(logs.certification) == 1
    assert refusal("b/sigma_0.25", kinds=("prediction", "training"))[0].endswith(
        "a prediction or training log"
    )


def test_several_untrusted_logs_are_an_error_after_all_their_reasons(workplace):
    put("a/sigma_0.12", IMPOSSIBLE)
    put("a/sigma_0.25", HEADER + "\n")
    put("a/sigma_0.50", b"\0\1")
    for argument in ("a", "a/*"):
        message, warnings = refusal(argument)
        assert message == f"{argument}: none of 3 logs can be used"
        assert [warning.split(" ")[0] for warning in warnings] == [
            "a/sigma_0.12",
            "a/sigma_0.25",
            "a/sigma_0.50",
        ]


LOOK_ALIKES = {
    "impossible": ("a/sigma_0.12", IMPOSSIBLE),
    "empty": ("a/sigma_0.25", b""),
    "binary": ("a/sigma_0.25", b"PK\x03\x04" + bytes(50)),
    "no header": ("a/sigma_0.25", CERTIFICATION.partition("\n")[2]),
    "text": ("a/sigma_1.00", b"Traceback (most recent call last):\n"),
    "header alone": ("a/sigma_0.25", HEADER + "\n"),
    "torn header": ("a/sigma_0.25", HEADER[:20]),
    "bars for tabs": ("a/ours.tsv", CERTIFICATION.replace("\t", "|")),
    "bars for tabs after a byte order mark": (
        "a/ours.tsv",
        "\ufeff" + CERTIFICATION.replace("\t", "|"),
    ),
    "predictions with bars": ("a/predictions", PREDICTION.replace("\t", "|")),
    "predictions that are empty": ("a/predictions", b""),
    "ours, empty, with its manifest": ("a/ours.tsv", b""),
    "ours, overwritten, with its manifest": ("a/ours.tsv", b"\0" * 100),
    "ours without its header, with its manifest": ("a/ours.tsv", CERTIFICATION.partition("\n")[2]),
    "with a broken manifest": ("a/sigma_0.25", CERTIFICATION),
}


@pytest.mark.parametrize("argument", [".", "**/*", "a", "a/*"])
@pytest.mark.parametrize("case", LOOK_ALIKES)
def test_file_that_merely_looks_like_a_log_is_not_passed_over(workplace, case, argument):
    file, content = LOOK_ALIKES[case]
    put("good/sigma_0.50")
    path = put(file, content)
    if "manifest" in case:
        manifest_path(path).write_text("{" if "broken" in case else MANIFEST)
    logs, warnings = read(argument, "good", kinds=("certification", "prediction"))
    assert [str(log.path) for log in logs.certification] == ["good/sigma_0.50"]
    (warning,) = warnings
    reason = "holds a radius that cannot be certified" if case == "impossible" else ""
    assert warning.startswith(f"{file} {reason}") and warning.endswith("it is left out")
    assert logs.left_out == [warning.removesuffix("; it is left out")]


@pytest.mark.parametrize(
    "name", ["stdout.txt", "README.md", "checkpoint.pth.tar", "curves.png", "log.txt", "x.json"]
)
@pytest.mark.parametrize("content", [b"", b"\x89PNG\0\r\n", b"Epoch 1\n", b"[]", b"\xff\xfe"])
def test_files_that_are_no_logs_are_passed_over_in_folders_but_not_when_named(
    workplace, name, content
):
    put("a/sigma_0.25")
    put(f"a/{name}", content)
    assert found("a") == [("a", "a/sigma_0.25")] and len(found("a/*")) == 1
    assert refusal(f"a/{name}")[0].startswith(f"a/{name} ")
    assert read("a", f"a/{name}")[1] == [], "the folder has named it before"


FAILING = [
    (Path, "read_bytes", "a/ours.tsv", "read", argument)
    for argument in (".", "a", "**/*", "a/*", "a/ours.tsv")
]
FAILING += [(os, "scandir", "a/deep", "listed", "a")]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize(("owner", "function", "path", "verb", "argument"), FAILING)
def test_what_cannot_be_read_or_listed_is_named_with_the_reason(
    tree, monkeypatch, owner, function, path, verb, argument, code
):
    """As of a failing file system, or of mode 0 where the reader is not root."""
    put("a/ours.tsv")
    original = getattr(owner, function)

    def failing(place):
        if str(place).endswith(path):
            raise OSError(code, os.strerror(code), str(place))
        return original(place)

    monkeypatch.setattr(owner, function, failing)
    logs, (warning,) = read("b", argument)
    assert warning == f"{path} cannot be {verb}: {os.strerror(code)}; it is left out"
    assert logs.left_out == [warning.removesuffix("; it is left out")] and logs.certification
    assert refusal(path) == (logs.left_out[0], [])


@pytest.mark.parametrize("target, code", [("loop", errno.ELOOP), ("gone", errno.ENOENT)])
def test_link_that_leads_nowhere_is_named(tree, target, code):
    Path("a/loop").symlink_to(target)
    (warning,) = read("a")[1]
    assert warning == f"a/loop cannot be read: {os.strerror(code)}; it is left out"


def test_manifests_are_neither_logs_nor_obstacles(workplace):
    log = put("a/ours.tsv", CERTIFICATION.replace("0.5", "0.25"))
    manifest_path(log).write_text(MANIFEST)
    for arguments in (["a"], ["a/*"], glob.glob("a/*"), ["a/ours.tsv"]):
        logs, _ = read(*arguments)
        (read_log,) = logs.certification
        assert read_log.path == log and read_log.facts.get("N") == 1000
    assert "is no certification log" in refusal(str(manifest_path(log)))[0]


def test_stated_values_win_for_every_log(tree):
    logs, _ = read("a", sigma=2.0)
    assert {log.facts.get("sigma") for log in logs.certification} == {2.0}
    # At which no radius of 0.5 can be certified.
    refusals.refusal(read, "a", sigma=0.1, names="none of 2 logs")


def test_training_images_are_left_out_beside_test_images(workplace):
    """The path or a manifest tells them."""
    put("noise_0.50/test/sigma_0.50")
    put("noise_0.50/train/sigma_0.50")
    settings_ = json.loads(MANIFEST)["settings"] | {"split": "train"}
    ours = put("noise_0.50/ours.tsv", CERTIFICATION.replace("0.5", "0.25"))
    manifest_path(ours).write_text(json.dumps({"settings": settings_, "runs": []}))
    logs, warnings = read(".")
    assert [log.facts.get("split") for log in logs.certification] == ["test"]
    reasons = [
        f"{path} certifies training images, the others do not"
        for path in (ours, "noise_0.50/train/sigma_0.50")
    ]
    assert logs.left_out == reasons and warnings == [
        f"{reason}; it is left out" for reason in reasons
    ]
    assert found("noise_0.50/train") == [("noise_0.50/train", "noise_0.50/train/sigma_0.50")], (
        "alone, it is used"
    )


@pytest.mark.parametrize(
    "files, expected",
    [
        (["a/b/sigma_0.25"], ["sigma_0.25"]),
        (["a/ours.tsv"], ["ours"]),
        (["a/x.tsv", "a/y.tsv"], ["x", "y"]),
        (["a/x/sigma_0.25", "a/y/sigma_0.25"], ["x", "y"]),
        (["noise_0.25/test/sigma_0.25", "noise_0.50/test/sigma_0.50"], None),
        (["x.tsv", "x/x.tsv"], None),
        (["a/x", "a/x.tsv"], None),
        (["a/b/x.tsv", "b/a/x.tsv"], None),
        (["x/sigma_0.25", "x/x/sigma_0.25"], None),
        ([".tsv", "a/.tsv"], None),
        ([".tsv"], None),
        (["a: x.tsv", "a/x.tsv"], None),
    ],
)
def test_names_are_short_unique_and_never_empty(workplace, files, expected):
    for file in files:
        put(file)
    given_names = names(*files)
    assert len(set(given_names)) == len(files) and all(given_names)
    assert expected is None or given_names == expected


def test_a_log_named_by_its_relative_and_its_absolute_path_is_one_log(workplace):
    put("sigma_0.25")
    assert names("sigma_0.25", workplace / "sigma_0.25", "./sigma_0.25") == ["sigma_0.25"]


NOTE = "its sigma is 0.5 (stated), but several of its radii are 0.953, the largest for sigma 0.25"


@pytest.mark.parametrize(
    ("largest", "stated", "sigma", "source", "note"),
    [
        ((0.953, 0.953), {}, 0.25, "inferred from the largest radius", ""),
        ((1.91, 1.91), {}, 0.5, "inferred from the largest radius", ""),
        ((0.953, 0.812), {}, None, None, "its sigma is unknown"),
        ((0.952, 0.952), {}, None, None, "its sigma is unknown"),
        ((0.953, 0.953), {"N": 10_000}, None, None, "its sigma is unknown"),
        ((0.953, 0.953), {"sigma": 0.25}, 0.25, "stated", ""),
        ((0.953, 0.953), {"sigma": 0.5}, 0.5, "stated", NOTE),
    ],
)
def test_sigma_follows_from_votes_that_were_all_for_one_class(
    workplace, largest, stated, sigma, source, note
):
    certification("mine/noise_0.25.tsv", [("R", radius) for radius in (0.123, *largest)])
    logs, _ = read("mine", **stated)
    (log,) = logs.certification
    assert (log.facts.get("sigma"), log.facts.sources.get("sigma")) == (sigma, source)
    assert " ".join(log.notes).startswith(note) and bool(log.notes) == bool(note)


@pytest.mark.parametrize(("shift", "word"), [(1, "smaller"), (-1, "larger"), (0, None), (2, None)])
def test_labels_that_begin_elsewhere_are_noted(workplace, shift, word):
    rows = [
        f"{i}\t{i % 8 + 2 + shift}\t{i % 8 + 2}\t0.1\t{int(shift == 0)}\t0\n" for i in range(24)
    ]
    put("a/sigma_0.50", "idx\tlabel\tpredict\tradius\tcorrect\ttime\n" + "".join(rows))
    (log,) = read("a")[0].certification
    notes = [note for note in log.notes if "if each label" in note]
    assert [f"were one {word}" in note for note in notes] == [True] * (word is not None)


def test_methods_of_unknown_names_are_not_one_method(workplace):
    for place in ("mine/noise_0.25", "yours/noise_0.25", "yours/noise_0.50", "salman/noise_0.25"):
        certification(f"{place}/sigma_0.25", [("R", 0.5)])
    logs, _ = read(".")
    assert [*groups_of(logs.certification, ["objective"])] == [
        "objective = SmoothAdv",
        "objective = unknown (mine)",
        "objective = unknown (yours)",
    ]
