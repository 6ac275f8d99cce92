"""Images by name: which indices a name stands for, what is refused, and that logs of other sets are
told apart.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import smoothadv
from smoothadv.analysis.logs import comparison_warnings
from smoothadv.analysis.reading import read_logs
from smoothadv.base.errors import UserError, escape
from smoothadv.datasets import describe_dataset, get_dataset
from smoothadv.evaluation.image_sets import image_set, images_named
from smoothadv.records.manifests import manifest_fault, record_of
from support.commands import call, refused, rows, settings_of, snapshot, succeed
from support.image_files import random_image, save_image
from support.verifier import script as script
from support.verifier import tampered, verdict

DIGITS = describe_dataset("digits")


@dataclass
class Labelled:
    """As much of a dataset as a name needs."""

    labels: list[int]
    description = DIGITS

    def __len__(self) -> int:
        return len(self.labels)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), min_size=1, max_size=9), st.data()
)
def test_indices_are_those_of_the_ranges_and_of_the_lines(tmp_path_factory, parts, data):
    ranges = [range(first, min(first + more, 300) + 1) for first, more in parts]
    wanted = {index for one in ranges for index in one}
    taken, words = set[int](), list[str]()
    for one in sorted(ranges, key=lambda one: (one.start, -len(one))):
        if not taken & {*one}:
            taken |= {*one}
            words.append(f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]))
    words = data.draw(st.permutations(words))
    assert images_named(image_set(",".join(words)), Labelled([0] * 301)) == sorted(taken)
    noise = data.draw(st.lists(st.sampled_from(["", "  ", "# 5", "\t#7 8"]), max_size=3))
    lines = [f" {index}{end}" for index, end in zip(wanted, ["", " # one", "\t"] * 99 + [""] * 99)]
    path = tmp_path_factory.mktemp("sets") / "list, of 3.txt"
    path.write_text("\n".join(data.draw(st.permutations([*lines, *noise]))))
    assert images_named(image_set(str(path)), Labelled([0] * 301)) == sorted(wanted)


@given(st.lists(st.integers(0, 3), min_size=12, max_size=80), st.integers(1, 3), st.integers(0, 99))
def test_images_of_each_class_are_those_of_the_smallest_digests(labels, each, seed):
    counts, dataset = Counter(labels), Labelled(labels)
    if min(counts.values()) < each:
        with pytest.raises(UserError, match="has . images? of class"):
            images_named(f"per-class:{each}:{seed}", dataset)
        return
    expected = []
    for label in counts:
        of_class = [index for index, other in enumerate(labels) if other == label]
        for _ in range(each):
            best = min(of_class, key=lambda i: hashlib.sha256(f"{seed} {i}".encode()).hexdigest())
            of_class.remove(best)
            expected.append(best)
    found = images_named(f"per-class:{each}:{seed}", dataset)
    assert found == sorted(expected) and {*Counter(labels[i] for i in found).values()} == {each}
    if not seed:
        assert images_named(f"per-class:{each}", dataset) == found


def test_images_of_each_class_are_a_random_choice():
    """Every image is as likely as any other: of 2,000 seeds, each of ten images is chosen about 200
    times. A chi-squared statistic of nine degrees of freedom is above 40 with probability 1e-5.
    """
    dataset = Labelled([0] * 10 + [1] * 10)
    chosen = Counter(images_named(f"per-class:1:{seed}", dataset)[0] for seed in range(2000))
    assert sum((chosen[index] - 200) ** 2 / 200 for index in range(10)) < 40
    assert sum((1000 * (index < 2) - 200) ** 2 / 200 for index in range(10)) > 40, "a control"


@pytest.fixture
def folder(workplace) -> str:
    """A dataset of files: two of a name in two classes, and one that has another name."""
    for number, place in enumerate(("cat/a.png", "cat/b.png", "dog/a.png", "dog/7.png")):
        save_image(Path("photos", place), random_image(number))
    return "imagefolder:photos"


def test_files_are_named_by_class_and_name(folder):
    Path("list.txt").write_text("dog/a.png\n# a comment\ncat/a.png  # another\n")
    assert images_named("list.txt", get_dataset(folder, "test")) == [0, 3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5-9\nx", "is not a set of images"),
        *((text, "is not a set of images: write A-B") for text in ("", "x", "-3", "5-", "1,,2")),
        *((text, "is not a set of images") for text in ("per-class:0", "per-class:x", "٣", "3.0")),
        ("4", "'imagefolder:photos' has 4 images, and no image 4"),
        ("0-9999999999", "has 4 images, and no image 4"),
        ("9-5", "has 4 images, and none is named"),
        ("0,2,1-2", "has one image 2, which is named twice"),
        ("per-class:3", "has 2 images of class"),
        ("empty.txt", "images empty.txt: 'imagefolder:photos' has 4 images, and none is named"),
        ("twice.txt", "has one image 0, which is named twice"),
        ("unknown.txt", "has no image file 'cow/a.png', but ones like 'cat/a.png'"),
        ("beyond.txt", "has 4 images, and no image 17"),
        ("binary.txt", "'binary.txt' cannot be read as a list of images"),
        ("photos", "is not a set of images"),
    ],
)
def test_bad_names_get_one_line(folder, text, words):
    Path("empty.txt").write_text("# nothing\n\n")
    Path("twice.txt").write_text("0\ncat/a.png\n")
    Path("unknown.txt").write_text("cow/a.png\n")
    Path("beyond.txt").write_text("17\n")
    Path("binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError) as error:
        images_named(image_set(text), get_dataset(folder, "test"))
    message = error.value.args[0]
    assert words in message and len(message.splitlines()) == 1


def test_images_without_files_have_no_names(workplace):
    Path("names.txt").write_text("cat/a.png\n")
    with pytest.raises(UserError, match="'digits' has no image file 'cat/a.png'$"):
        images_named("names.txt", get_dataset("digits", "test"))


# Logs

SET = "3,8-11,350"


@pytest.fixture(scope="module")
def logs(checkpoint, tmp_path_factory) -> dict[str, Path]:
    """Logs of two named sets, one of them by two names, and of every tenth image."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "list.txt").write_text("\n".join(map(str, [350, 3, 8, 9, 10, 11])))
    chosen = {"listed": ("--images", SET), "file": ("--images", folder / "list.txt")}
    chosen |= {"drawn": ("--images", "per-class:1"), "skipped": ("--skip", 60)}
    for name, options in chosen.items():
        numbers = ("--N", 100, "--device", "cpu", "--seed", int(name == "file"))
        succeed("certify", "digits", checkpoint, 0.25, folder / f"{name}.tsv", *numbers, *options)
    return {name: folder / f"{name}.tsv" for name in chosen}


def test_log_has_these_images_and_its_manifest_says_so(logs):
    wanted = [3, 8, 9, 10, 11, 350]
    assert [int(row["idx"]) for row in rows(logs["listed"])] == wanted
    record = settings_of(logs["listed"])["image_set"]
    sha256 = hashlib.sha256(b"3\n8\n9\n10\n11\n350\n").hexdigest()
    assert record == {"named": SET, "count": 6, "sha256": sha256, "indices": "3,8,9,10,11,350"}
    assert {"image_set"}.isdisjoint(settings_of(logs["skipped"]))
    assert sorted({int(row["label"]) for row in rows(logs["drawn"])}) == [*range(10)]


def test_other_names_of_the_same_images_continue_a_log_and_other_images_do_not(
    logs, checkpoint, workplace, capsys
):
    def again(*options: object):
        numbers = ("--N", 100, "--device", "cpu")
        return call(
            capsys, "certify", "digits", checkpoint, 0.25, logs["listed"], *numbers, *options
        )

    before = snapshot(logs["listed"].parent)
    Path("other.txt").write_text("8\n9\n10\n11\n350\n3\n")
    assert again("--images", "other.txt").code == 0
    for options in (("--images", "3,8-11"), ("--images", "3,8-11,351"), (), ("--skip", 1)):
        assert refused(again(*options), "image_set.sha256 was 'd", "--overwrite starts anew")
    assert snapshot(logs["listed"].parent) == before


def test_rows_are_verified_and_a_few_are_drawn_again(logs, script, tmp_path, capsys):
    assert verdict(script, logs["listed"], capsys)[1].endswith(": 6 of 6 rows hold\n")
    outcome = call(capsys, "certify", "verify", logs["listed"], "--rows", 2, "--device", "cpu")
    assert outcome.code == 0 and "all are equal" in outcome.out
    short = tampered(logs["listed"], tmp_path / "short.tsv", lambda table, _: table.pop(4))
    assert (
        not (said := verdict(script, short, capsys))[0] and "1 of 6 images are missing" in said[1]
    )
    outcome = call(capsys, "certify", "verify", short, "--rows", 2, "--device", "cpu")
    assert refused(outcome, "1 of 6 images are missing, 11")


def of_another_image(table, manifest):
    table[5]["idx"] = "351"


def of_another_list(table, manifest):
    """The rows' own images in the place of those that were named."""
    table[5]["idx"] = "351"
    manifest["settings"]["image_set"]["indices"] = "3,8,9,10,11,351"


def beyond_the_dataset(table, manifest):
    table[5]["idx"] = "359"
    manifest["settings"]["image_set"] = record_of(SET, [3, 8, 9, 10, 11, 359])


def forgery(**changes):
    return lambda table, manifest: manifest["settings"]["image_set"].update(changes)


@pytest.mark.parametrize(
    ("tampering", "words"),
    [
        (of_another_image, "its image is not among those selected"),
        (of_another_list, "image_set"),
        (beyond_the_dataset, "images that its dataset has not"),
        *(
            (forgery(**changes), "image_set")
            for changes in ({"count": 7}, {"sha256": "ab"}, {"indices": "3-11"}, {"indices": 3})
        ),
    ],
)
def test_rows_of_images_that_were_not_named_are_refused(
    logs, script, tmp_path, capsys, tampering, words
):
    log = tampered(logs["listed"], tmp_path / "forged.tsv", tampering)
    accepted, said = verdict(script, log, capsys)
    assert not accepted and words in said, said
    with pytest.raises(UserError, match=words):
        read_logs([str(log)])


KEYS = st.sampled_from(["named", "count", "sha256", "indices"])
VALUES = st.none() | st.integers() | st.text()


@given(VALUES | st.lists(VALUES) | st.dictionaries(KEYS, VALUES | st.just("1,2")))
def test_any_other_record_is_refused(value):
    assert "image_set" in manifest_fault({"settings": {"image_set": value}, "runs": []})


def test_logs_of_other_images_are_told_apart_whatever_names_them(logs):
    sets = read_logs([str(logs[name]) for name in ("listed", "file")])
    assert {log.images for log in sets.all} == {""} and not any(log.progress for log in sets.all)
    said, names = comparison_warnings(sets), (SET, logs["file"].with_name("list.txt"))
    for log, name in zip(sets.all, names):
        assert f"{log.path}: images are chosen by name, --images {escape(str(name), 60)}" in said
    sets = read_logs([str(logs[name]) for name in ("listed", "drawn", "skipped")])
    names = [
        "digits, 6 images of 3,8-11,350",
        "digits, 10 images of per-class:1",
        "digits, 6 images",
    ]
    assert [log.images for log in sets.all] == names
    assert [log.label.text for log in sets.all] == [
        f"{log.name}, {name}" for log, name in zip(sets.all, names)
    ]
    assert any("not all on the same test images" in text for text in comparison_warnings(sets))


def test_certificates_of_named_images_are_attacked(logs, checkpoint, workplace, capsys):
    options = ["--against", logs["listed"], "--num-steps", 1, "--num-noise-vec", 1, "--N", 20]
    outcome = call(
        *(capsys, "attack", "digits", checkpoint, 0.25, "out", *options, "--device", "cpu"),
        *("--images", "0-9"),
    )
    claimed = [int(row["idx"]) for row in rows(logs["listed"]) if float(row["radius"]) > 0]
    attacked = [int(row["idx"]) for row in rows(Path("out/against.tsv"))]
    assert outcome.code == 0 and attacked == [index for index in claimed if index < 10]
    assert "of 3 images may flip by chance" in outcome.out, "those without a certificate count too"
    outcome = call(
        *(capsys, "attack", "digits", checkpoint, 0.25, "none", *options, "--device", "cpu"),
        *("--images", "100-109"),
    )
    assert refused(outcome, "certifies none of the images that were chosen")


def test_functions_take_the_indices_themselves(module_and_images):
    module, images, labels = module_and_images
    calls = [[7, 2], np.array([2, 7]), (2, 7), "2,7", range(2, 8, 5)]
    found = [
        smoothadv.certify(module, images, labels, sigma=0.25, n=50, image_set=chosen)
        for chosen in calls
    ]
    assert all(table.idx.tolist() == [2, 7] for table in found)
    for chosen, words in (([8], "no image 8"), ("x", "image_set: found 'x'"), ([], "image_set")):
        with pytest.raises(UserError, match=words):
            smoothadv.certify(module, images, labels, sigma=0.25, image_set=chosen)
    with pytest.raises(UserError, match="image_set is not read with skip, limit or other"):
        smoothadv.certify(module, images, labels, sigma=0.25, image_set="1", skip=2)


@pytest.fixture
def module_and_images() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    return network, torch.rand(8, 1, 2, 2), torch.arange(8) % 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--images", "per-class:2"], "20 of 20 images of 10 classes of digits"),
        (["--images", "1,2"], "2 of 2 images of 2 classes"),
    ],
)
def test_dry_run_says_how_many_classes_they_have(
    checkpoint, workplace, capsys, monkeypatch, options, words
):
    monkeypatch.setattr("smoothadv.evaluation.certify._draws_per_second", lambda *given: 1000.0)
    outcome = call(
        capsys,
        "certify",
        "digits",
        checkpoint,
        0.25,
        "log.tsv",
        "--device",
        "cpu",
        "--dry-run",
        *options,
    )
    assert outcome.code == 0 and outcome.out.startswith(words)
