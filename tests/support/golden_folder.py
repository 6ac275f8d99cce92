"""Logs of every kind in one folder, for which tests/data/analyses.txt has what analyses print."""

from pathlib import Path

import pytest

from smoothadv.records.logs import manifest_path
from support.analyzed_folder import FIVE, ORACLE, SELECTION, certification, fill_folder, log
from support.procedure_logs import GRID, put, put_one_of_each

RUN = "epoch train_loss train_accuracy test_loss test_accuracy test_images"
CLASSIFIER = {"checkpoint_sha256": "a", "sigma": 0.25, "run": {**SELECTION, "max": 4}}


def fill() -> None:
    """Write the logs into the working folder."""
    fill_folder()
    put_one_of_each()
    put("other/log.tsv", GRID[1:], "adaptive")
    for epsilon in ("127", "0.5", "255"):
        certification(f"three/PGD_2steps/eps_{epsilon}/noise_0.50/test/sigma_0.50", ORACLE)
    for dataset, largest in (("cifar10", 3.8), ("imagenet", 3.8), ("imagenet", 0.9)):
        path = f"steps/{largest}/{dataset}/noise_1.00/test/sigma_{largest / 3:.2f}"
        certification(path, [("R", largest), ("R", 0.1)])
    for folder in ("many/one", "many/two"):
        certification(f"{folder}/sigma_0.50", [("R", 1.0)] * 500)
    certification("plain.tsv", ORACLE)
    # A finished log, half of it certified within 0.25, and one whose three images are within 0.5.
    log("unfinished/whole.tsv", [0.25] * 5 + [0.0] * 5)
    log("unfinished/begun.tsv", [0.5] * 3)
    log("begun/whole.tsv", [0.1] * 9 + [0.0], attack=0.25)
    log("begun/begun.tsv", [0.1] * 3, attack=0.25)
    # Trainings of which not every epoch was evaluated.
    for name, evaluated in (("one", (2, 5)), ("two", (5,))):
        tested = ["1.5 0.5 9" if epoch in evaluated else "nan nan 0" for epoch in range(6)]
        rows = [f"{k} {2 - k / 10} {k / 10} {test}" for k, test in enumerate(tested)]
        Path(f"runs/{name}").mkdir(parents=True)
        Path(f"runs/{name}/log.txt").write_text("\n".join([RUN, *rows]).replace(" ", "\t") + "\n")
    # Sets of images: two models on ten, one on five of these, one on those of another dataset.
    log("sets/ten.tsv", [0.5] * 7 + [0.0] * 3)
    log("sets/ten2.tsv", [0.5] * 6 + [0.0] * 4)
    log("sets/five.tsv", [0.5] * 5, run=FIVE)
    log("sets/cifar.tsv", [0.5] * 8 + [0.0] * 2, dataset="cifar10", dataset_fingerprint="cd")
    changes = [
        {"dataset_fingerprint": "cd"},
        {"idx": range(1, 21, 2)},
        {"split": "validation"},
        {"N": 10000, "alpha": 0.01},
    ]
    for name, change in zip(("data", "images", "split", "settings"), changes):
        log(f"{name}/one.tsv", [0.5] * 7 + [0.0] * 3)
        log(f"{name}/two.tsv", [0.5] * 10, **change)
        log(f"{name}/five.tsv", [0.5] * 5, run=FIVE, **change)
    for name, radii in (("a", [0.5] * 10), ("b", [0.5] * 5), ("c", [0.5, 0.0])):
        manifest_path(log(f"released/digits/{name}/sigma_0.50", radii)).unlink()
    log("ours.tsv", [0.5] * 9 + [0.0])
    # Procedures: two are one-sided, of which one is on a grid, and two certify more.
    log("procedures/exact.tsv", [0.5] * 6 + [0.0] * 4, method="exact")
    log("procedures/adaptive.tsv", [0.5] * 7 + [0.0] * 3, method="adaptive")
    log("procedures/two.tsv", [0.5] * 9 + [0.0], method="two-sided", alpha_share=0.9)
    log("procedures/top.tsv", [0.5] * 10, method="top-k", top_k=3, alpha_share=0.9)
    # Two models on the same images, and on others.
    for name, radii in (("a", [0.5] * 6 + [0.0] * 4), ("b", [0.25] * 8 + [0.0] * 2)):
        log(f"held/chosen/{name}.tsv", radii, checkpoint_sha256=name)
        log(f"held/others/{name}.tsv", radii[3:], range(1, 15, 2), checkpoint_sha256=name, run={})
    # A certified model, two attacks on it, and a log of attempts to falsify its certificates.
    log("gap/certified.tsv", [0.4, 0.3, 0.1, 0.0], method="exact", **CLASSIFIER)
    log("gap/out/near.tsv", [0.1, 0.0, 0.1, 0.0], attack=0.25, num_noise_vec=8, **CLASSIFIER)
    log("gap/out/far.tsv", [0.0, 0.0, 0.1, 0.0], attack=0.5, num_noise_vec=8, **CLASSIFIER)
    header = "idx label predict basePredict correct time attack_norm epsilon abstain certified"
    against = log("gap/out/against.tsv", [0.1], against={}, **CLASSIFIER)
    rows = [f"{header} radius flipped".split(), "0 1 1 1 1 0:00:01 0.1 0.1 0 1 0.4 0".split()]
    against.write_text("".join("\t".join(row) + "\n" for row in rows))
    Path("gap/out/far.npz").write_bytes(b"PK\x03\x04")


@pytest.fixture(scope="module")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of these logs."""
    folder = tmp_path_factory.mktemp("golden")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fill()
    return folder
