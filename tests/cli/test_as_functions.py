"""The functions of the package are its commands: the same checkpoint, images and seed give the same
log.
"""

import torch

import smoothadv
from smoothadv.checkpoints import load_classifier
from smoothadv.datasets import get_dataset
from support.commands import succeed, timeless
from support.sharding import key_of_log, manifest_of


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


def test_a_module_on_tensors_gets_the_classes_of_its_checkpoint(checkpoint, workplace):
    """The images are the same, but their noise is not: it is keyed by what identifies classifier
    and images.
    """
    digits = get_dataset("digits", "test")
    images, labels = zip(*(digits[index] for index in range(8)))
    options = {"sigma": 0.05, "n": 300, "n0": 20, "device": "cpu"}
    named = smoothadv.certify(checkpoint, "digits", maximum=8, **options, log="named.tsv")
    model = load_classifier(checkpoint, "digits")
    for name, classifier in {
        "module": model,
        "checkpoint": checkpoint,
    }.items():  # the checkpoint tells its classes
        given = smoothadv.certify(
            classifier, torch.stack(images), torch.tensor(labels), **options, log=f"{name}.tsv"
        )
        decided = (named.predict >= 0) & (given.predict >= 0)
        assert decided.sum() >= 5 and (given.predict == named.predict)[decided].all()
        assert (given.successes - named.successes).abs().max() < 90, (
            "five standard deviations at most"
        )
    keys = {
        name: key_of_log(workplace / f"{name}.tsv") for name in ("named", "module", "checkpoint")
    }
    assert keys["checkpoint"].classifier == keys["named"].classifier != keys["module"].classifier
    assert keys["checkpoint"].dataset == keys["module"].dataset != keys["named"].dataset
