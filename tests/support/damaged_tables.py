"""Accidents that happen to tables in files: odd fields, moved columns, changed bytes."""

import random
from collections.abc import Sequence

# Fields of a table that a lenient parser would take for numbers, and others that it would not
# expect.
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
_LINE_ENDS, _ODD_ENDS = (
    ["\n", "\n", "\n", "\r\n", "\r"],
    ["\n\n", "\r\r\n", "", " \n", "\t\n", "\x0b", "\u2028"],
)
_STARTS = [*[""] * 9, "\ufeff", "\ufeff\ufeff", "\n", "#\n"]


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
