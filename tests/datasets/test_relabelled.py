"""Images under the classes of a network: which class of the network each class of the images is."""

import pytest
import torch
from torchvision.models import ResNet18_Weights

from smoothadv.datasets import describe_dataset, get_dataset
from smoothadv.datasets.relabelled import RelabelledImages, matched_classes
from support.named_networks import save_folder
from support.refusals import refusal

NAMES = (
    ("tench, Tinca tinca", "n01440764"),
    ("tiger shark", "n01491361"),
    ("crane", "n02012849"),
    ("crane", "n03126707"),
)


@pytest.mark.parametrize(
    ("folders", "names", "labels"),
    [
        (["tench", "tiger_shark"], NAMES, [0, 1]),
        (["Tiger Shark", "TINCA_tinca"], NAMES, [1, 0]),
        (["n03126707", "n02012849", "N01440764"], NAMES, [3, 2, 0]),
        (["1", "tench", "3"], NAMES, [1, 0, 3]),
        (["tench, Tinca tinca", "tench"], NAMES, [0, 0]),
        # As of digits, whose classes a network may have in another order: names say more than
        # numbers.
        (["0", "1"], (("1",), ("0",)), [1, 0]),
        # Without names the order counts, but numbers say more.
        (["a", "b", "c", "d"], (), [0, 1, 2, 3]),
        (["2", "0", "1", "3"], (), [2, 0, 1, 3]),
    ],
)
def test_folders_are_matched_by_name_synset_number_or_order(folders, names, labels):
    assert matched_classes(folders, names, len(names) or 4, "net") == labels


LIKE = "by its name, like 'tench, Tinca tinca', or by its number in the network, 0 to 3"


@pytest.mark.parametrize(
    ("folders", "names", "words"),
    [
        *(
            (folders, NAMES, f"'{folders[0]}': name each class of the images {LIKE}")
            for folders in (["crane", "tench"], ["zebu"], ["4"], ["-1"], ["tenc"], [" "])
        ),
        (["Tench", "tench"], NAMES, f"'Tench', 'tench': name each class of the images {LIKE}"),
        *(
            (folders, (), "")
            for folders in (["a", "b"], ["a", "b", "1", "2"], ["1", "2", "3", "4"])
        ),
        ([f"f{number}" for number in range(9)], (), "'f0', 'f1', 'f2', 'f3', 'f4', ... (9 in all)"),
    ],
)
def test_folder_that_is_no_class_or_several_is_named(folders, names, words):
    message = refusal(matched_classes, folders, names, 4, "net")
    assert f"net has no class, or several classes, called {words}" in message


WORDS = ResNet18_Weights.DEFAULT.meta["categories"]
OF_1000 = {
    "words": (WORDS, [0, 278, 904]),
    "words in another order": (WORDS[::-1], [999, 721, 95]),
    "TensorFlow's": (["background", *WORDS], [1, 279, 905]),
    "words of another language": ([f"Klasse {number}" for number in range(1000)], [0, 278, 904]),
    "none": ((), [0, 278, 904]),
}


@pytest.mark.parametrize("names, labels", OF_1000.values(), ids=OF_1000)
def test_synsets_are_classes_of_all_networks_of_imagenet(names, labels, recwarn):
    """Of a tench, a kit fox, and a window screen."""
    synsets, named = ["n01440764", "n02119789", "n04589890"], [(name,) for name in names]
    assert matched_classes(synsets, named, len(named) or 1000, "net") == labels
    assert ["like 'Klasse 0': the" in str(one.message) for one in recwarn] == [True] * (
        "Klasse 0" in names
    )
    known, in_kit = (describe_dataset(name).class_names for name in ("imagenet", "imagenet32"))
    if "Klasse 0" in names or not names:
        for folders in (known, in_kit):
            found = matched_classes(folders, named, 1000, "net")
            assert found == [known.index(synset) for synset in folders]
    assert sorted(in_kit) == list(known), "labels of the published files, less one"
    assert (in_kit[0], in_kit[448]) == ("n02119789", "n01440764")
    refusal(matched_classes, synsets, named[:999], 999, "net", names="'n01440764'")


def test_labels_are_those_of_the_network_and_all_else_stays(tmp_path):
    images = get_dataset(f"imagefolder:{save_folder(tmp_path, 'a', 'b')}", "test")
    changed = RelabelledImages(images, ("x", "a", "b"), [2, 1])
    assert [label for _, label in (changed[index] for index in range(4))] == [2, 2, 1, 1] and len(
        changed
    ) == 4
    assert all(torch.equal(changed[index][0], images[index][0]) for index in range(4))
    assert (changed.description.class_names, images.description.class_names) == (
        ("x", "a", "b"),
        ("a", "b"),
    )
    batches, cpu = [torch.tensor([3, 0])], torch.device("cpu")
    for found in (
        changed.evaluation_batches(batches, cpu),
        changed.training_batches(batches, cpu, torch.Generator().manual_seed(0)),
    ):
        ((pixels, labels),) = found
        assert labels.tolist() == [1, 2] and pixels.shape == (2, 3, 8, 8)


def test_chosen_images_have_labels_of_their_own():
    images, cpu = get_dataset("digits", "test"), torch.device("cpu")
    chosen = RelabelledImages(images, "st", torch.tensor([1, 1, 0]), torch.tensor([30, 7, 5]))
    assert len(chosen) == 3 and chosen.labels.tolist() == [1, 1, 0] and chosen[2][1] == 0
    ((pixels, labels),) = chosen.evaluation_batches([torch.tensor([2, 0])], cpu)
    assert labels.tolist() == [0, 1] and torch.equal(pixels[1], images[30][0])
    others = RelabelledImages(images, "st", torch.tensor([1, 1, 0]), torch.tensor([30, 7, 4]))
    assert chosen.fingerprint() != others.fingerprint()


def test_fingerprint_changes_with_images_and_labels(tmp_path):
    images = get_dataset(f"imagefolder:{save_folder(tmp_path / 'one', 'a', 'b')}", "test")
    others = get_dataset(f"imagefolder:{save_folder(tmp_path / 'two', 'a', 'b', 'c')}", "test")
    made = [(images, [0, 1]), (images, [1, 0]), (images, [0, 2]), (others, [0, 1])]
    found = {RelabelledImages(each, ("x", "y", "z"), labels).fingerprint() for each, labels in made}
    assert len(found | {images.fingerprint()}) == 5
    assert RelabelledImages(images, ("x", "y"), [1, 0]).fingerprint() in found, (
        "whatever the classes are called"
    )
