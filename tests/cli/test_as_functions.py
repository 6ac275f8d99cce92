"""The functions of the package are its commands: the same checkpoint, images and seed give the same
log.
"""

import smoothadv
from support.commands import succeed, timeless
from support.sharding import manifest_of


def test_certify_as_a_function_writes_the_log_of_the_command(checkpoint, workplace):
    words = ["--N", 300, "--N0", 20, "--max", 8, "--device", "cpu", "--seed", 5]
    succeed("certify", "digits", checkpoint, 0.25, "command.tsv", *words)
    options = {"sigma": 0.25, "n": 300, "n0": 20, "maximum": 8, "device": "cpu", "seed": 5}
    smoothadv.certify(str(checkpoint), "digits", **options, log="function.tsv")
    assert timeless(workplace / "function.tsv") == timeless(workplace / "command.tsv")
    command, function = (manifest_of(workplace / f"{name}.tsv") for name in ("command", "function"))
    assert function["settings"] == command["settings"]
    (workplace / "command.tsv").rename(workplace / "old.tsv")
    (workplace / "command.tsv.manifest.json").rename(workplace / "old.tsv.manifest.json")
    smoothadv.certify(checkpoint, "digits", **{**options, "maximum": 10}, log="old.tsv")
    assert len(timeless(workplace / "old.tsv")) == 10, "it goes on with a log of the command"
