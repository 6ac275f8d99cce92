"""Hostile files and arguments for ``fuzzing.py``: good files, and accidents that happen to them."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import pickle
import pickletools
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ODD_FIELDS = (
    [
        "",
        " ",
        "-1",
        "-2",
        "+3",
        " 3 ",
        "03",
        "3.0",
        "3.5",
        "1e1",
        "1e400",
        "1e-400",
        "nan",
        "inf",
        "-inf",
        "True",
    ]
    + [
        "False",
        "None",
        "NA",
        "null",
        "0x1A",
        "1_0",
        "0.2_5",
        "٣",
        "０.５",
        "½",
        "0,5",
        "1 000",
        "'1'",
        '"1',
        "\\t",
    ]
    + [
        "9" * 18,
        str(2**63 - 1),
        str(2**63),
        str(2**64 + 3),
        "9" * 5000,
        "0.99999999999999999999",
        "9007199254740993.",
    ]
    + ["\ufeff3", "\xa03", "3\u2028", "3\x0b", "3\x0c", "3\x1c", "3\x85", "3\x1b[2J", "x" * 100_000]
    + ["idx", "radius", "correct", "#", "2", "99"]
)
"""Fields of a table that a lenient parser would take for numbers, and others that it would not
expect.
"""
_LINE_ENDS, _ODD_ENDS = (
    ["\n", "\n", "\n", "\r\n", "\r"],
    ["\n\n", "\r\r\n", "", " \n", "\t\n", "\x0b", "\u2028"],
)
_STARTS = [*[""] * 9, "\ufeff", "\ufeff\ufeff", "\n", "#\n"]
_NAMES = [
    "",
    " ",
    "\x1b[2J\x07",
    "\u202egnp.exe",
    "a\nb",
    "x" * 300,
    "y" * 100_000,
    "\udcff",
    "a=b",
]
_NAMES += (
    "sigma=0.25 N=x = ** [ . .. - -- ~ $x$ %s%n {noise} pipe pipe.py loop folder certified.tsv "
    "model.tar"
).split()
_NAMES += "grid.toml digits noise imagefolder:images imagefolder:pipe imagefolder:".split()
_NAMES += "imagenet32 nobody.py".split()
_NAMES += "runner-up DDN 1/0 0/2 5/2 -1/2 cuda:99 meta".split()
_NUMBERS = [*"-1 0 1 2 3 0.25 -0.0 nan inf 1e400 1e-400 1e5 0x1 ٣".split(), "9" * 5000]
_HUGE = ["99999999999", str(2**63), "9" * 40, "1e300"]
# Of these a huge value is a long run, which is what it asks for.
_LASTING = set(
    "--num-steps --restarts --num-noise-vec --epochs --N --max --png --evaluate-images".split()
)
# These start other programs, or print no errors as one line.
_NEVER = set("--compile --fast --track --debug --help --version --overwrite".split())
JSON_VALUES: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    7,
    2**63,
    10**30,
    0.5,
    -0.0,
    math.nan,
    math.inf,
    1e308,
    "",
    "1",
    "digits",
    "\x1b[2J",
    "\ud800",
    "x" * 100_000,
    [],
    {},
    [[]],
    {"": {}},
    [None],
    ["a"],
    [1] * 1000,
    [1, 2],
    # the last is more than a pickle can hold
    *(json.loads("[" * depth + "]" * depth) for depth in (60, 500)),
]
_FEW = "--N 20 --max 1 --device cpu".split()
_CERTIFY = ["certify", "digits", "model.tar", "0.25", "certified.tsv", *_FEW, "--N0", "5"]
_PREDICT = ["predict", "digits", "model.tar", "0.25", "predicted.tsv", *_FEW]
_ATTACK = [
    "attack",
    "digits",
    "model.tar",
    "0.25",
    "attacked",
    *_FEW,
    *"--epsilon 0.5 --num-steps 1".split(),
]
_AGAINST = [
    "attack",
    "digits",
    "model.tar",
    "0.25",
    "against",
    *_FEW,
    *"--against certified.tsv --num-steps 1".split(),
]
_STEP = "--epochs 1 --steps-per-epoch 1 --batch 4 --evaluate-images 2 --device cpu".split()
_TRAIN = ["train", "imagefolder:images", "digits_resnet8", "run", "--noise", "0.25", *_STEP]
_TRAIN_PGD = ["train_pgd", *_TRAIN[1:], *"--attack PGD --epsilon 0.5 --num-steps 1".split()]
_IMAGENET32 = [
    "train",
    "imagenet32",
    "cifar_resnet20",
    "new",
    "--noise",
    "0.25",
    *_STEP,
    "--data-dir",
    "imagenet32",
]
_CIFAR10 = [
    "train",
    "cifar10",
    "cifar_resnet20",
    "new",
    "--noise",
    "0.25",
    *_STEP,
    "--data-dir",
    "cifar10",
]
_MORE = ["--max", "2"]  # than there is already
_TABLES = "summary table envelope examples parameters compare gap empirical".split()
_FIGURES = "plot plot_envelope heat_map plot_empirical plot_training report".split()
UNCHANGED = {"images", "imagenet32", "cifar10", "folder", "m"}
"""Folders that no command changes."""
_FIELDS = "epoch arch state_dict input_layer mean std classes image_shape noise_sd".split()
_SWEPT = "gaussian/digits/digits_resnet8/noise_0.25"
# fmt: on


class Case(NamedTuple):
    """A command's words, and the files that are replaced before it runs, by name."""

    words: list[str]
    files: dict[str, bytes]


def start(words: Sequence[str]) -> int:
    """Run a command in this process; returns its exit code."""
    return importlib.import_module(f"smoothadv.cli.{words[0]}").main(list(words[1:]))


def prepare(place: Path) -> None:
    """Make the files that are good, in ``place``, and so load what the commands load."""
    import numpy as np
    from PIL import Image

    os.chdir(place)
    os.environ["https_proxy"] = (
        "http://127.0.0.1:9"  # nothing is to be downloaded in place of a damaged file
    )
    generator = np.random.default_rng(0)
    for path in (
        f"images/{split}/{name}/{i}.png"
        for split in ("train", "test")
        for name in "ab"
        for i in range(4)
    ):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (8, 8), np.uint8)).save(path)
    pixels, labels = generator.integers(0, 256, (6, 8, 8), np.uint8), generator.integers(0, 2, 6)
    np.savez_compressed("unlabelled.npz", images=pixels, labels=labels)
    Path("unlabelled.pickle").write_bytes(
        pickle.dumps({"images": pixels, "labels": labels}, protocol=2)
    )
    for name in ("imagenet32", "cifar10/cifar-10-batches-py", "folder"):
        Path(name).mkdir(parents=True)
    batch = {"data": generator.integers(0, 256, (5, 3072), np.uint8), "labels": [1, 2, 3, 4, 1000]}
    for name in ["val_data", *(f"train_data_batch_{number}" for number in range(1, 11))]:
        Path("imagenet32", name).write_bytes(pickle.dumps(batch))
    Path("cifar10/cifar-10-batches-py/test_batch").write_bytes(pickle.dumps(batch))
    sweep = (
        '[fixed]\ndataset = "digits"\narch = "digits_resnet8"\nrecipe = "smoke"\n[[sweep]]\nnoise '
        "= [0.25, 0.5]\n"
    )
    Path("grid.toml").write_text(
        f'models = "m"\nlogs = "l"\n{sweep}[[certify]]\nN = 20\nN0 = 5\nmax = 1\n'
    )
    first = ["train", "digits", "digits_resnet8", "first", *_TRAIN[4:]]
    shards = [
        ["certify", *_CERTIFY[1:4], "whole.tsv", *_FEW, "--max", "4", "--shard", f"{k}/2"]
        for k in (0, 1)
    ]
    analyses = [
        ["analyze", name, "certified.tsv", "attacked", "run", "-o", "out"]
        for name in ("plot", "report")
    ]
    others = [
        _TRAIN,
        [*_TRAIN_PGD[:3], "other", *_TRAIN_PGD[4:]],
        _CERTIFY,
        _PREDICT,
        _ATTACK,
        *shards,
        *analyses,
    ]
    assert start(first) == 0
    shutil.copy("first/checkpoint.pth.tar", "model.tar")
    for words in others:
        assert start(words) == 0, words
    # Radii that can be attacked: a model of one step certifies none.
    table = [line.split("\t") for line in Path("certified.tsv").read_text().splitlines()]
    rows = [table[0], *map(_certified, table[1:])]
    Path("certified.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    shutil.copytree("first", f"m/{_SWEPT}")
    Path(f"l/{_SWEPT}/test").mkdir(parents=True)
    for end in ("", ".manifest.json"):
        shutil.copy(f"certified.tsv{end}", f"l/{_SWEPT}/test/sigma_0.25.tsv{end}")
    record = {"state": "failed", "stage": "train", "line": "no word", "host": "a", "pid": 1}
    Path(f"l/{_SWEPT}/job.json").write_text(json.dumps(record))
    for name in ("other", "first", "out", "out.png", "out.pdf", "out.html"):
        shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink(missing_ok=True)


def _certified(row: list[str]) -> list[str]:
    """The row of a log, of an image that is classified correctly by all 20 draws."""
    return [row[0], row[1], row[1], "0.1", "1", row[5], "20", "20", *row[8:]]


def damaged(content: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """The content after a few accidents: bytes changed, cut off, moved, repeated, or replaced by
    those of another.
    """
    result = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at, length = rng.randrange(len(result) + 1), rng.choice([1, 2, 8, 64, 1000])
        other = rng.choice(others)
        begin = rng.randrange(len(other) + 1)
        accidents = [
            result[:at],
            result[:at] + result[at + length :],
            result[:at] + result[at : at + length] * 2,
        ]
        accidents[1:1] = [
            result[:at] + bytes([rng.choice([0, 1, 10, 27, 127, 128, 255])]) + result[at + 1 :]
        ] * 4
        accidents += [
            result[:at] + other[begin : begin + length] + result[at + length * rng.randrange(2) :]
        ]
        result = bytearray(accidents[rng.randrange(len(accidents))])
    return bytes(result)


def doctored(value: Any, hostile: Sequence[Any], rng: random.Random) -> Any:
    """A copy of nested dicts and lists in which one entry, somewhere, is replaced, removed, renamed
    or added.
    """
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
        return rng.choice(hostile)
    copy = value.copy()
    key = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
    accident = rng.random()
    if accident < 0.6:
        copy[key] = doctored(copy[key], hostile, rng)
    elif accident < 0.7:
        del copy[key]
    elif accident < 0.8 and isinstance(copy, dict):
        copy[rng.choice(["", "\x1b[2J", "x" * 1000, 7, None, True])] = copy.pop(key)
    else:
        copy[key] = rng.choice(hostile)
    return copy


def doctored_table(content: bytes, rng: random.Random) -> bytes:
    """A tab-separated table with a few odd fields and names, lines or columns added, removed or
    moved, and odd ends.
    """
    lines = [line.split("\t") for line in content.decode().splitlines()]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        line = rng.choice(lines)
        accident = rng.randrange(9)
        if accident < 3:
            line[rng.randrange(len(line))] = rng.choice(ODD_FIELDS)
        elif accident == 3:
            lines.insert(rng.randrange(len(lines) + 1), list(line))
        elif accident == 4 and len(lines) > 1:
            lines.remove(line)
        elif accident == 5:
            lines[0][rng.randrange(len(lines[0]))] = rng.choice(
                ["", "Idx", "correct", "time", "radius", "x"]
            )
        elif accident == 6:
            order = rng.sample(range(len(lines[0])), len(lines[0]))
            lines = [[each[column] for column in order if column < len(each)] for each in lines]
        elif accident == 7:
            column, repeated = rng.randrange(len(line) + 1), rng.choice([["7"], ["x"], ["idx"], []])
            lines = [[*each[:column], *(repeated or each[:1]), *each[column:]] for each in lines]
        elif len(line) > 1:
            column = rng.randrange(len(line))
            lines = [[*each[:column], *each[column + rng.randrange(2) :]] for each in lines]
    ends = (
        [rng.choice(_LINE_ENDS)]
        if rng.random() < 0.8
        else rng.choices([*_LINE_ENDS, *_ODD_ENDS], k=5)
    )
    text = "".join("\t".join(line) + ends[number % len(ends)] for number, line in enumerate(lines))
    return (rng.choice(_STARTS) + text).encode("utf-8", "surrogatepass")


def doctored_pickle(content: bytes, rng: random.Random) -> bytes:
    """A pickle in which whole instructions are removed, repeated or exchanged, or the types of
    arrays are others.
    """
    if rng.random() < 0.3:
        old = rng.choice([b"u1", b"i8", b"|", b"<"])
        new = rng.choice(
            [b"O8", b"O", b"V4", b"M8", b"f8", b"S9", b"U1", b"u9", b">", b"=", b"\0\0"]
        )
        return content.replace(old, new.ljust(len(old)), rng.choice([1, -1]))
    starts = [position for _, _, position in pickletools.genops(content)] + [len(content)]
    parts = [content[begin:end] for begin, end in zip(starts, starts[1:])]
    for _ in range(rng.choice([1, 1, 2, 4])):
        one, other = rng.randrange(len(parts)), rng.randrange(len(parts))
        parts[one] = rng.choice(
            [b"", parts[one] * 2, parts[other], damaged(parts[one], parts, rng)]
        )
    return b"".join(parts)


class Kinds:
    """One method per kind of case, which makes one from the good files in ``place``."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._options = {name: _options(words) for name, words in _COMMANDS.items()}

    def _bytes(self, name: str) -> bytes:
        return (self.place / name).read_bytes()

    def _damaged(self, name: str, rng: random.Random) -> dict[str, bytes]:
        others = [
            "certified.tsv",
            "model.tar",
            "certified.tsv.manifest.json",
            "unlabelled.npz",
            "unlabelled.pickle",
        ]
        return {name: damaged(self._bytes(name), [self._bytes(other) for other in others], rng)}

    def log(self, rng: random.Random) -> Case:
        name = rng.choice(
            [
                "certified.tsv",
                "attacked/epsilon_0.5.tsv",
                "run/log.txt",
                "whole.tsv.shards/0-of-2.tsv",
            ]
        )
        files = (
            {name: doctored_table(self._bytes(name), rng)}
            if rng.random() < 0.7
            else self._damaged(name, rng)
        )
        return Case(self._reader_of(name, rng), files)

    def manifest(self, rng: random.Random) -> Case:
        shards = ["whole.tsv.shards/0-of-2.tsv", "whole.tsv.shards/1-of-2.tsv"]
        logs = ["certified.tsv"] * 3 + [
            "attacked/epsilon_0.5.tsv",
            *shards,
            f"l/{_SWEPT}/test/sigma_0.25.tsv",
        ]
        name = rng.choice(
            [f"{log}.manifest.json" for log in logs] + [f"l/{_SWEPT}/job.json", "run/args.json"]
        )
        files = self._damaged(name, rng)
        if rng.random() < 0.85:
            content = json.loads(self._bytes(name))
            for _ in range(rng.choice([1, 1, 2, 4])):
                content = doctored(content, JSON_VALUES, rng)
            files = {name: json.dumps(content).encode()}
        return Case(self._reader_of(name, rng), files)

    def _reader_of(self, name: str, rng: random.Random) -> list[str]:
        """A command that reads a log, or a file beside it."""
        if name.startswith("whole"):
            return ["certify", "merge", "whole.tsv"]
        if name.startswith("l/"):
            return (
                ["sweep", "status", "grid.toml"]
                if rng.random() < 0.9
                else "sweep report grid.toml -o out".split()
            )
        if name.startswith("run"):
            figure = ["analyze", "plot_training", name, "-o", "out.png"]
            return figure if rng.random() < 0.1 else [*_TRAIN, "--resume", "--epochs", "2"]
        of = name.removesuffix(".manifest.json")
        resumed = [_CERTIFY, _AGAINST] if of == "certified.tsv" else [_ATTACK]
        if rng.random() < 0.4:
            return [*rng.choice(resumed), "--resume", *rng.choice([[], _MORE])]
        logs = rng.choice([[of], ["."], [f"a={of}", "b=certified.tsv"], [of, "certified.tsv"]])
        if rng.random() < 0.05:
            return ["analyze", rng.choice(_FIGURES), *logs, "-o", "out"]
        return [
            "analyze",
            rng.choice(_TABLES),
            *logs,
            "--format",
            rng.choice(["markdown", "latex", "csv", "json"]),
        ]

    def checkpoint(self, rng: random.Random) -> Case:
        import torch

        name = rng.choice(["model.tar", "model.tar", "run/checkpoint.pth.tar"])
        words = rng.choice(
            [[*_CERTIFY, "--resume", *_MORE], [*_PREDICT, "--overwrite"], [*_ATTACK, "--overwrite"]]
        )
        words = rng.choice([words, words, [*_TRAIN, "--overwrite", "--pretrained-model", name]])
        if name.startswith("run"):
            words = [*_TRAIN, "--resume", "--epochs", "2"]
        if name.startswith("run") or rng.random() < 0.2:
            return Case(words, self._damaged(name, rng))
        whole = torch.load(self.place / name, weights_only=True)
        content = {name: whole[name] for name in _FIELDS}
        for _ in range(rng.choice([1, 1, 2, 4])):
            content = doctored(content, [*JSON_VALUES[:-1], *_tensors()], rng)
        stored = io.BytesIO()
        torch.save(content, stored)
        return Case(words, {name: stored.getvalue()})

    def pickle(self, rng: random.Random) -> Case:
        sources = {
            "unlabelled.pickle": [*_TRAIN, "--overwrite", "--use-unlabelled", "unlabelled.pickle"],
            "imagenet32/train_data_batch_1": _IMAGENET32,
            "cifar10/cifar-10-batches-py/test_batch": _CIFAR10,
        }
        name = rng.choice(list(sources))
        files = (
            {name: doctored_pickle(self._bytes(name), rng)}
            if rng.random() < 0.8
            else self._damaged(name, rng)
        )
        return Case(sources[name], files)

    def archive(self, rng: random.Random) -> Case:
        name = rng.choice(["unlabelled.npz", "attacked/epsilon_0.5.npz"])
        words = [*_TRAIN, "--overwrite", "--use-unlabelled", "unlabelled.npz"]
        if name.startswith("attacked"):
            words = [*_ATTACK, "--resume", "--png", "2", *rng.choice([[], _MORE])]
        return Case(words, self._damaged(name, rng))

    def arguments(self, rng: random.Random) -> Case:
        command = rng.choice(list(_COMMANDS))
        base, known = list(_COMMANDS[command]), self._options[command]
        count = 1 if base[0] not in ("analyze", "sweep") and base[1] != "merge" else 2
        odd = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            flag = rng.choice(known)
            numbers = _NUMBERS if flag in _LASTING else _NUMBERS + _HUGE
            odd += [
                flag,
                *rng.choices([*_NAMES, *numbers, *numbers], k=rng.choice([0, 1, 1, 1, 2])),
            ]
        places = [at for at in range(count, len(base)) if not base[at].startswith("-")]
        if rng.random() < 0.3 and places:
            at = rng.choice(places)
            base[at] = rng.choice(
                [*_NAMES, *_NUMBERS, *([] if base[at - 1] in _LASTING else _HUGE)]
            )
        # What bounds the work comes last, and so counts.
        return Case(
            [*base[:count], *odd, *base[count:]]
            if rng.random() < 0.9
            else [*base, rng.choice(_NAMES)],
            {},
        )


_COMMANDS = {
    **{f"analyze {name}": ["analyze", name, "certified.tsv"] for name in _TABLES},
    **{f"analyze {name}": ["analyze", name, "certified.tsv", "-o", "out"] for name in _FIGURES},
    **{f"certify {number}": [*_CERTIFY, "--resume"] for number in range(4)},
    **{f"predict {number}": [*_PREDICT, "--resume"] for number in range(4)},
    **{f"attack {number}": _ATTACK for number in range(4)},
    **{f"train {number}": [*_TRAIN[:3], "new", *_TRAIN[4:]] for number in range(6)},
    **{f"train_pgd {number}": [*_TRAIN_PGD[:3], "new", *_TRAIN_PGD[4:]] for number in range(6)},
    "attack --against": _AGAINST,
    "certify merge": ["certify", "merge", "whole.tsv"],
    "predict merge": ["predict", "merge", "predicted.tsv", "whole.tsv.shards/0-of-2.tsv"],
    "attack merge": ["attack", "merge", "attacked/epsilon_0.5.tsv"],
    "sweep plan": ["sweep", "plan", "grid.toml"],
    "sweep status": ["sweep", "status", "grid.toml"],
}
KINDS = [name for name in vars(Kinds) if not name.startswith("_")]


def _tensors() -> list[Any]:
    import torch

    plain = torch.zeros(3)
    odd = [
        plain,
        plain.to(torch.int8),
        plain.to(torch.complex64),
        plain.to_sparse(),
        torch.zeros(3, device="meta"),
    ]
    odd += [
        plain / 0,
        torch.zeros(0),
        torch.zeros(()),
        torch.zeros(1).expand(1 << 30),
        plain.to(torch.bfloat16),
    ]
    return [*odd, torch.zeros(1, dtype=torch.bool)]


def _options(words: Sequence[str]) -> list[str]:
    """The long options of a command, from its help."""
    text = io.StringIO()
    subcommand = [words[1]] if words[0] in ("analyze", "sweep") or words[1] == "merge" else []
    with contextlib.redirect_stdout(text):
        start([words[0], *subcommand, "--help"])
    return sorted(
        set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text.getvalue(), re.MULTILINE)) - _NEVER
    )
