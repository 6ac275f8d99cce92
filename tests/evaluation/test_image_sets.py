"""Images by name: which indices a name stands for, what is refused, and that logs of other sets are
told apart.
"""

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import smoothadv
from smoothadv.analysis.logs import comparison_warnings
from smoothadv.analysis.reading import read_logs
from smoothadv.datasets import describe_dataset, get_dataset
from smoothadv.evaluation.image_sets import image_set, images_named
from smoothadv.records.logs import in_file, manifest_fault, record_of
from support.commands import call, refused, rows, settings_of, snapshot, succeed
from support.image_files import random_image, save_image
from support.refusals import refusal
from support.verifier import script as script
from support.verifier import tampered, verdict


class Labelled(list):
    """As much of a dataset as a name needs: its labels."""

    description = describe_dataset("digits")
    labels = property(list)


@given(st.sets(st.integers(0, 300), min_size=1, max_size=40), st.integers(0, 9), st.randoms())
def test_indices_are_those_of_the_ranges_and_of_the_lines(tmp_path_factory, indices, more, random):
    last, dataset = max(indices), Labelled([0] * 311)
    words = [f"{last}-{last + more}", *map(str, indices - {last})]
    random.shuffle(words)
    wanted = sorted({*indices, *range(last, last + more + 1)})
    assert images_named(image_set(",".join(words)), dataset) == wanted
    lines = [f" {word}\t" for word in words] + ["", "  ", "# 5", "\t#7 8"]
    random.shuffle(lines)
    path = tmp_path_factory.mktemp("sets") / "list, of 3.txt"
    path.write_text("\n".join(lines))
    assert images_named(image_set(str(path)), dataset) == wanted


@given(st.lists(st.integers(0, 3), min_size=12, max_size=80), st.integers(1, 3), st.integers(0, 99))
def test_images_of_each_class_are_those_of_the_smallest_digests(labels, each, seed):
    counts, dataset = Counter(labels), Labelled(labels)
    if min(counts.values()) < each:
        assert "of class" in refusal(images_named, f"per-class:{each}:{seed}", dataset)
        return
    digests = [hashlib.sha256(f"{seed} {index}".encode()).hexdigest() for index in range(80)]
    found = images_named(f"per-class:{each}:{seed}", dataset)
    assert Counter(labels[index] for index in found) == dict.fromkeys(counts, each)
    for index, label in enumerate(labels):
        better = sum(labels[i] == label and digests[i] < digests[index] for i in range(len(labels)))
        assert (index in found) == (better < each)
    assert seed or images_named(f"per-class:{each}", dataset) == found


@pytest.fixture
def folder(workplace) -> str:
    """A dataset of files, some of whose names look like comments: of a name in two classes, two."""
    for number, place in enumerate(("#cat/a.png", "#cat/b.png", "dog/a.png", "dog/7 #1.png")):
        save_image(Path("photos", place), random_image(number))
    return "imagefolder:photos"


LISTS = {
    "empty.txt": b"# nothing\n\n",
    "twice.txt": b"0\n#cat/a.png\n",
    "cut.txt": b"dog/a.png # 3\n",
    "unknown.txt": b"cow/a.png\n",
    "beyond.txt": b"17\n",
    "binary.txt": b"\xff\xfe\x00",
    "list.txt": b"dog/7 #1.png\n# a comment\n#dog/a.png\n#cat/b.png\n",
}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(
            (text, "is no set of images and no file: write indices, like 3,7,20-30")
            for text in ("5-9\nx", "", "x", "-3", "5-", "1,,2", "per-class:0", "per-class:x")
        ),
        *((text, "is no set of images and no file") for text in ("٣", "3.0", "photos")),
        ("4", "'imagefolder:photos' has 4 images, and no image 4"),
        ("0-9999999999", "has 4 images, and no image 4"),
        ("9-5", "images 9-5: write 5-9, not 9-5"),
        ("0,3-1", "write 1-3, not 3-1"),
        ("0,2,1-2", "has one image 2, which is named twice"),
        ("per-class:3", "has 2 images of class"),
        ("empty.txt", "images empty.txt: 'imagefolder:photos' has 4 images, and none is named"),
        ("twice.txt", "has one image 0, which is named twice"),
        ("unknown.txt", "has no image file 'cow/a.png', but ones like '#cat/a.png'"),
        ("cut.txt", "has no image file 'dog/a.png # 3', but"),
        ("beyond.txt", "has 4 images, and no image 17"),
        ("binary.txt", "'binary.txt' cannot be read as a list of images"),
    ],
)
def test_bad_names_get_one_line(folder, text, words):
    for name, content in LISTS.items():
        Path(name).write_bytes(content)
    dataset = get_dataset(folder, "test")
    assert words in refusal(lambda: images_named(image_set(text), dataset))
    assert images_named("list.txt", dataset) == [1, 2]


# Logs

SET = "3,8-11,350"


@pytest.fixture(scope="module")
def logs(checkpoint, tmp_path_factory) -> dict[str, Path]:
    """Logs of two named sets, one of them by two names, and of every tenth image."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "3-5").write_text("\n".join(map(str, [350, 3, 8, 9, 10, 11])))
    chosen = {"listed": ("--images", SET), "file": ("--images", folder / "3-5")}
    chosen |= {"drawn": ("--images", "per-class:1"), "skipped": ("--skip", 60)}
    for name, options in chosen.items():
        numbers = ("--N", 100, "--device", "cpu", "--seed", int(name == "file"))
        succeed("certify", "digits", checkpoint, 0.25, folder / f"{name}.tsv", *numbers, *options)
    return {name: folder / f"{name}.tsv" for name in chosen}


def test_log_has_these_images_and_its_manifest_says_so(logs):
    indices = ",".join(row["idx"] for row in rows(logs["listed"]))
    sha256 = hashlib.sha256(b"3\n8\n9\n10\n11\n350\n").hexdigest()
    record = {"named": SET, "count": 6, "sha256": sha256, "indices": indices}
    assert settings_of(logs["listed"])["image_set"] == record
    assert settings_of(logs["file"])["image_set"] == {**record, "named": "./3-5"}, "no range"
    assert sorted({int(row["label"]) for row in rows(logs["drawn"])}) == [*range(10)]


def test_other_names_of_the_same_images_continue_a_log_and_other_images_do_not(
    logs, checkpoint, workplace, capsys
):
    command = ("certify", "digits", checkpoint, 0.25, logs["listed"], "--N", 100, "--device", "cpu")
    before = snapshot(logs["listed"].parent)
    Path("other.txt").write_text("8\n9\n10\n11\n350\n3\n")
    assert call(capsys, *command, "--images", "other.txt").code == 0
    was = f"the set of images was {SET} (6 images), now"
    for options, words in (
        (("--images", "3,8-11"), "3,8-11 (5 images); image 350 is left out;"),
        (("--images", "3,8-10,350-358"), "3,8-10,350-358 (13 images); image 11 is left out;"),
        (("--images", "3,5,8-11,350"), "3,5,8-11,350 (7 images); image 5 is new;"),
        ((), "that of --skip and --max;"),
    ):
        outcome = call(capsys, *command, *options)
        assert refused(outcome, f"{was} {words} --overwrite starts anew"), outcome
    assert snapshot(logs["listed"].parent) == before


def test_rows_are_verified_and_a_few_are_drawn_again(logs, script, tmp_path, capsys):
    assert verdict(script, logs["listed"], capsys)[1].endswith(": 6 of 6 rows hold\n")
    again = ("certify", "verify", "--rows", 2, "--device", "cpu")
    assert "all are equal" in call(capsys, *again, logs["listed"]).out
    short = tampered(logs["listed"], tmp_path / "short.tsv", lambda table, _: table.pop(4))
    assert "1 of 6 images are missing" in verdict(script, short, capsys)[1]
    assert refused(call(capsys, *again, short), "1 of 6 images are missing, 11")


def forgery(index=None, **changes):
    """The last row of another image, and a manifest that names others."""
    return lambda table, manifest: (
        table[5].update(idx=index or table[5]["idx"]),
        manifest["settings"]["image_set"].update(changes),
    )


BEYOND = {"index": "359", **record_of(SET, [3, 8, 9, 10, 11, 359])}


@pytest.mark.parametrize(
    ("tampering", "words"),
    [
        (forgery("351"), "its image is not among those selected"),
        (forgery("351", indices="3,8,9,10,11,351"), "image_set"),
        (forgery(**BEYOND), "images that its dataset has not"),
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
    assert not accepted and words in said and words in refusal(read_logs, [str(log)])


KEYS = st.sampled_from(["named", "count", "sha256", "indices"])
VALUES = st.none() | st.integers() | st.text()


@settings(max_examples=30)
@given(VALUES | st.lists(VALUES) | st.dictionaries(KEYS, VALUES | st.just("1,2")))
def test_any_other_record_is_refused(value):
    assert "image_set" in manifest_fault({"settings": {"image_set": value}, "runs": []})


@given(st.text(min_size=1, max_size=30), st.integers(1, 3))
def test_the_record_of_any_name_is_accepted_and_that_of_a_file_reads_as_no_range(name, times):
    records = record_of(name * times, [3]), record_of(f"lists/{name * times}", [3])
    assert not any(manifest_fault({"settings": {"image_set": one}, "runs": []}) for one in records)
    assert in_file(records[1]["named"])


def test_logs_of_other_images_are_told_apart_whatever_names_them(logs):
    sets = read_logs([str(logs[name]) for name in ("listed", "file")])
    assert {log.images for log in sets.all} == {""} and not any(log.progress for log in sets.all)
    note = f"{logs['listed']} and 1 more: images are chosen by name, --images {SET}, ./3-5"
    assert [text for text in comparison_warnings(sets) if "by name" in text] == [note]
    sets = read_logs([str(logs[name]) for name in ("listed", "drawn", "skipped")])
    assert [log.label.text.removeprefix(log.name) for log in sets.all] == [
        ", digits, 6 images (3,8-11,350)",
        ", digits, 10 images (per-class:1)",
        ", digits, 6 images",
    ]
    assert any("not all on the same test images" in text for text in comparison_warnings(sets))


def test_certificates_of_named_images_are_attacked(logs, checkpoint, workplace, capsys):
    command = (
        *("attack", "digits", checkpoint, 0.25, "out", "--against", logs["listed"]),
        *("--num-steps", 1, "--num-noise-vec", 1, "--N", 20, "--device", "cpu", "--images"),
    )
    assert refused(call(capsys, *command, "100-109"), "certifies none of the images that were")
    outcome = call(capsys, *command, "0-9")
    claimed = [row["idx"] for row in rows(logs["listed"])[:3] if float(row["radius"]) > 0]
    assert claimed and claimed == [row["idx"] for row in rows(Path("out/against.tsv"))]
    assert "listed.tsv has no rows of 7 images of those named" in outcome.err
    assert "of 3 images may flip by chance" in outcome.out, "those without a certificate count too"


def test_functions_take_the_indices_themselves():
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    images, labels = torch.rand(8, 1, 2, 2), torch.arange(8) % 2
    for chosen in ([7, 2], np.array([2, 7]), "2,7", range(2, 8, 5)):
        table = smoothadv.certify(module, images, labels, sigma=0.25, n=50, image_set=chosen)
        assert table.idx.tolist() == [2, 7]
    asked = {"image_set": [8]}, {"image_set": "x"}, {"image_set": []}, {"image_set": "1", "skip": 2}
    told = "no image 8", "image_set: found 'x'", "image_set: found ''", "image_set is not read with"
    for chosen, words in (*zip(asked, told), ({"image_set": b"3"}, "image_set: found b'3'")):
        assert words in refusal(smoothadv.certify, module, images, labels, sigma=0.25, **chosen)
