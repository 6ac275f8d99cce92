"""Options of the released SmoothAdv and Cohen et al. commands that are called otherwise here, or
are not needed.
"""

import shlex

_RELEASED = {
    "--gpu": (1, []),
    "--adv-training": (0, []),
    "--train-multi-noise": (0, []),
    "--visualize-examples": (0, []),
    "--workers": (1, []),
    "--print-freq": (1, []),
    "--noise_sd": (1, ["--noise"]),
    "--learning-rate": (1, ["--lr"]),
    "--wd": (1, ["--weight-decay"]),
    "--self-training-weight": (1, ["--unlabelled-weight"]),
}
"""Of each option the number of its values, and the option that takes them here; [] where there is
none.
"""


def translated(program: str, words: list[str]) -> str | None:
    """The command line that here does what ``words`` do in the released code; None if they are none
    of its options.

    --gpu becomes an environment variable. An --epsilon above 3 is counted in 1/256.
    """
    equated = [
        f"--{word}" if word.startswith("alpha=") else word for word in words
    ]  # as the released README has it
    left = [
        part
        for word in equated
        for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    if equated == words and not any(word in _RELEASED for word in left):
        return None
    gpus, found = "", shlex.split(program)
    while left:
        word = left.pop(0)
        values, option = _RELEASED.get(word, (0, [word]))
        taken, left = left[:values], left[values:]
        gpus = (
            "".join(f"CUDA_VISIBLE_DEVICES={value} " for value in taken)
            if word == "--gpu"
            else gpus
        )
        found += [*option, *(taken if option else [])]
        if (
            word == "--epsilon"
            and left
            and left[0].replace(".", "", 1).isdigit()
            and float(left[0]) > 3
        ):
            found.append(f"{left.pop(0)}/256")
    return gpus + shlex.join(found)
