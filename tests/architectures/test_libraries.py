"""Networks of libraries by name: what the library knows of them, how they fit images, and what
cannot be had.
"""

import copy
import sys
from dataclasses import replace
from importlib import import_module
from unittest import mock

import pytest
import torch
from torch import nn

from smoothadv.architectures import get_architecture, made_architecture
from smoothadv.architectures.libraries import LIBRARIES, library_network
from smoothadv.base.errors import UserError
from smoothadv.datasets import describe_dataset
from smoothadv.models.load import classifier_digest
from smoothadv.voting.classifier import optimized_for_inference
from support.named_networks import NAMES, save_hf, save_onnx, small_network
from support.optional import needs
from support.refusals import refusal

PHOTOS = replace(
    describe_dataset("digits"),
    name="photos",
    class_names=("a", "b", "c", "d"),
    image_shape=(3, 32, 32),
)
IMAGENET_MEAN = (0.485, 0.456, 0.406)


def named(name: str, *more: object) -> object:
    """A case of a network by name, which needs its library."""
    packages = {"timm": "timm", "hf": "transformers", "onnx": "onnxruntime"}
    package = packages.get(name.partition(":")[0])
    return pytest.param(name, *more, marks=needs(package) if package else ())


@pytest.mark.parametrize(
    ("name", "preparation", "alias"),
    [
        named("timm:resnet18", "224,235,bicubic", "n01440764"),
        named("timm:resnet18.a1_in1k", "224,235,bicubic", "n01440764"),
        ("torchvision:resnet18", "224,256", "tench"),
    ],
)
def test_library_says_classes_constants_and_preparation(name, preparation, alias):
    """The published values: floor(224 / 0.95) = 235 of timm's recipe A1, 256 and 224 of
    torchvision.
    """
    found = library_network(name, pretrained=False)
    assert (str(found.preparation), found.mean) == (preparation, IMAGENET_MEAN)
    assert len(found.class_names) == 1000 and alias in found.class_names[0]
    assert (
        found.class_names[0][0].startswith("tench")
        and found.version.split()[0] == name.partition(":")[0]
    )


@pytest.mark.parametrize(
    ("processor", "preparation"),
    [
        ({"size": {"height": 32, "width": 32}, "resample": 3}, "32,squash,bicubic"),
        ({"size": 32}, "32,squash"),
        (
            {
                "size": {"shortest_edge": 40},
                "crop_size": {"height": 32, "width": 32},
                "do_center_crop": True,
            },
            "32,40",
        ),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875, "resample": 3}, "224,256,bicubic"),
        ({"size": {"shortest_edge": 384}, "crop_pct": 0.875}, "384,squash"),
        ({"size": {"height": 32, "width": 30}}, None),
        ({"size": 32, "do_resize": False}, None),
        ({"size": {"longest_edge": 40}, "do_center_crop": True, "crop_size": 32}, None),
    ],
)
def test_preparation_of_a_folder_of_transformers(processor, preparation, tmp_path):
    """What the image processors ViT, BiT and ConvNeXt do with these settings."""
    constants = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    found = library_network(f"hf:{save_hf(tmp_path, **processor, **constants)}", pretrained=True)
    assert (str(found.preparation) if found.preparation else None) == preparation
    assert (found.mean, found.std, found.class_names) == (
        (0.5,) * 3,
        (0.25,) * 3,
        tuple((name,) for name in NAMES),
    )


def test_folder_of_transformers_says_whether_it_normalizes_and_numbers_its_classes(tmp_path):
    names = tuple((f"class {11 - number}",) for number in range(12))
    folder = save_hf(
        tmp_path,
        names=[name for (name,) in names],
        image_mean=[0.5],
        image_std=[0.5],
        do_normalize=False,
    )
    found = library_network(f"hf:{folder}", pretrained=True)
    assert (found.mean, found.std, found.class_names) == (None, None, names)


@needs("transformers")
def test_folder_of_transformers_gives_the_weights_that_were_saved(tmp_path):
    from transformers import ResNetForImageClassification

    saved = ResNetForImageClassification.from_pretrained(save_hf(tmp_path)).state_dict()
    found = library_network(f"hf:{tmp_path}", pretrained=True)
    assert all(torch.equal(value, saved[name]) for name, value in found.module.state_dict().items())
    assert (found.mean, found.preparation) == (None, None)
    drawn = library_network(f"hf:{tmp_path}", pretrained=False).module.state_dict()
    assert not torch.equal(drawn["classifier.1.weight"], saved["classifier.1.weight"])


@pytest.mark.parametrize(
    "name", [*map(named, ["timm:test_resnet", "timm:test_efficientnet", "hf:FOLDER"])]
)
def test_network_takes_the_channels_size_and_classes_of_digits(name, tmp_path):
    if "FOLDER" in name:
        name = f"hf:{save_hf(tmp_path)}"
    model = get_architecture(name, "digits")
    assert model.training and model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
    torch.manual_seed(1)
    one = get_architecture(name, "digits").state_dict()
    torch.manual_seed(1)
    assert all(
        torch.equal(value, one[key])
        for key, value in get_architecture(name, "digits").state_dict().items()
    )


@pytest.mark.parametrize("name", [named("timm:test_vit"), "torchvision:vit_b_32"])
def test_transformer_takes_the_size_of_the_images(name):
    assert get_architecture(name, PHOTOS)(torch.rand(1, 3, 32, 32)).shape == (1, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        named(
            "timm:test_vit",
            r"timm:test_vit cannot be applied to images of shape \[1, 8, 8\].*"
            "divisible by patch size",
        ),
        ("torchvision:resnet18", "torchvision:resnet18 cannot be applied .* 3 channels, but got 1"),
        named("timm:resnet19", "there is no timm:resnet19 .did you mean 'resnet"),
        ("torchvision:resnt18", "there is no torchvision:resnt18 .did you mean 'resnet18'"),
        ("torchvision:fcn_resnet50", "torchvision:fcn_resnet50 cannot be"),
        named("timm:", "there is no timm:"),
        ("tim:resnet18", "did you mean 'timm'"),
        named("onnx:file", "onnx:file is for evaluation"),
        named("hf:/nowhere/at/all", "hf:/nowhere/at/all cannot be made: .*/nowhere/at/all"),
    ],
)
def test_what_cannot_be_made_is_one_line(name, message):
    with pytest.raises(UserError, match=message):
        get_architecture(name, "digits")


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("timm:resnet18", "timm", "timm"),
        named("hf:x", "transformers", "transformers"),
        ("onnx:x", "onnxruntime", "onnx"),
    ],
)
def test_missing_package_is_one_line(name, package, extra, monkeypatch):
    for module in [one for one in sys.modules if one.partition(".")[0] == package] + [package]:
        monkeypatch.setitem(sys.modules, module, None)
    words = f"{name} needs the package {package}: pip install 'smoothadv[{extra}]'"
    refusal(library_network, name, pretrained=False, names=words)


def test_missing_package_of_a_plug_in_is_called_by_its_own_name(monkeypatch):
    monkeypatch.setitem(LIBRARIES, "mine", lambda *made: import_module("nowhere"))
    words = "mine:x needs the package nowhere: pip install nowhere"
    assert refusal(library_network, "mine:x", pretrained=False).endswith(words)


@needs("timm")
@pytest.mark.parametrize("reached", [True, False])
def test_hub_is_asked_for_files_only_where_it_can_be_reached(reached, monkeypatch):
    """huggingface_hub itself would try six times."""
    import huggingface_hub
    import timm

    def create(*arguments, **options):
        was_offline.append(huggingface_hub.constants.HF_HUB_OFFLINE)
        return make(*arguments)

    was_offline, make = list[bool](), timm.create_model
    session = mock.Mock()
    session.head.side_effect = None if reached else OSError("no route")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    monkeypatch.setattr(timm, "create_model", create)
    library_network("timm:test_resnet", pretrained=True)
    assert was_offline == [not reached] and not huggingface_hub.constants.HF_HUB_OFFLINE


@needs("timm")
@pytest.mark.parametrize("images", [None, PHOTOS])
@pytest.mark.parametrize("name", ["timm:test_resnet", "torchvision:resnet18"])
def test_weights_that_cannot_be_fetched_are_one_line(name, images, monkeypatch):
    import timm
    from torchvision import models

    def unreachable(*arguments, **options):
        raise OSError("no route\nto host")

    monkeypatch.setattr(timm, "create_model", unreachable)
    monkeypatch.setattr(models, "get_model", unreachable)
    advice = "--no-pretrained takes" if images is None else "leave --pretrained out"
    words = f"the weights of {name} cannot be had (no route): {advice}"
    refusal(library_network, name, pretrained=True, images=images, names=words)


def test_pretrained_network_keeps_all_but_a_last_layer_of_other_classes(monkeypatch):
    """torchvision's constants replace those of the dataset; of 1,000 classes the last layer stays,
    too.
    """
    from torchvision import models

    trained = models.get_model("resnet18", weights=None)
    monkeypatch.setattr(models, "get_model", lambda name, weights: copy.deepcopy(trained))
    description, model = made_architecture("torchvision:resnet18", PHOTOS, "normalize", True)
    assert (
        description == replace(PHOTOS, mean=IMAGENET_MEAN, std=(0.229, 0.224, 0.225))
        and model.training
    )
    assert model[0].mean.flatten().tolist() == pytest.approx(IMAGENET_MEAN)
    kept, expected = model[1].state_dict(), trained.state_dict()
    assert {name for name in expected if not torch.equal(kept[name], expected[name])} == {
        "fc.weight",
        "fc.bias",
    }
    assert kept["fc.weight"].shape == (4, 512)
    same = replace(PHOTOS, class_names=tuple(map(str, range(1000))))
    assert torch.equal(
        made_architecture("torchvision:resnet18", same, "normalize", True)[1][1].fc.weight,
        trained.fc.weight,
    )


def test_pretrained_weights_are_of_libraries():
    words = "resnet50 is not of a library that has weights: "
    assert "timm" in refusal(made_architecture, "resnet50", PHOTOS, "normalize", True, names=words)


@pytest.mark.parametrize("fixed", [False, True])
def test_onnx_computes_what_the_network_does(fixed, tmp_path):
    """In batches of any size, also where the file is for 4; arranged for voting, and copied."""
    network, images = small_network(), torch.rand(7, 3, 8, 8)
    name = f"onnx:{save_onnx(tmp_path / 'n.onnx', network, images[:4], fixed)}"
    found = library_network(name, pretrained=True).module
    voter = optimized_for_inference(copy.deepcopy(found).double(), torch.device("cpu"), images[0])
    with torch.inference_mode():
        for batch in (images, images[:4], images[:1]):
            torch.testing.assert_close(voter(batch), network(batch), rtol=1e-5, atol=1e-5)
    assert not voter.is_folded and len(found.sha256) == 32
    other = save_onnx(
        tmp_path / "m.onnx", nn.Sequential(small_network(), nn.Softmax(1)), images[:4]
    )
    assert not torch.equal(
        library_network(f"onnx:{other}", pretrained=True).module.sha256, found.sha256
    )


@pytest.mark.parametrize("location", ["n.onnx.data", "weights/all.bin"])
def test_digest_of_onnx_covers_weights_in_other_files(location, tmp_path):
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    model = onnx.load(save_onnx(tmp_path / "n.onnx", small_network(), torch.rand(2, 3, 8, 8)))
    (tmp_path / "weights").mkdir()
    onnx.save_model(
        model, tmp_path / "n.onnx", save_as_external_data=True, location=location, size_threshold=0
    )

    def digest() -> list[int]:
        return library_network(
            f"onnx:{tmp_path / 'n.onnx'}", pretrained=True
        ).module.sha256.tolist()

    before, weights = digest(), (tmp_path / location).read_bytes()
    (tmp_path / location).write_bytes(bytes([weights[0] ^ 1]) + weights[1:])
    changed = digest()
    (tmp_path / location).write_bytes(weights)
    (tmp_path / "other.bin").write_bytes(b"no part of it")
    assert changed != before == digest()
    (tmp_path / location).unlink()
    refusal(digest, names="n.onnx: its weights cannot be read: ")


def test_onnx_refuses_what_it_lacks(tmp_path):
    network = library_network(
        f"onnx:{save_onnx(tmp_path / 'n.onnx', small_network(), torch.rand(2, 3, 8, 8))}", True
    ).module
    images = torch.rand(2, 3, 8, 8)
    refusal(network, images.bfloat16(), names="computes in float32: leave --precision out")
    words = "no gradients: attack it with --gradient stein or hard-stein"
    refusal(network, images.requires_grad_(), names=words)
    with pytest.raises(ValueError, match="ONNX Runtime: .*"):
        network(torch.rand(2, 3, 9, 9))
    (tmp_path / "bad.onnx").write_text("no network")
    save_onnx(tmp_path / "flat.onnx", nn.Linear(4, 2), torch.rand(2, 4))
    for name, words in {
        "bad.onnx": "cannot be had",
        "none.onnx": "there is no such file",
        "flat.onnx": "expected float32 images [B, C, H, W] alone",
    }.items():
        refusal(library_network, f"onnx:{tmp_path / name}", True, names=words)


@needs("transformers")
def test_other_configuration_of_the_same_weights_is_another_classifier(tmp_path):
    """The number of heads of attention is neither in weights nor in the printed structure."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "image_size": 32,
        "patch_size": 8,
    }
    ViTForImageClassification(ViTConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path)
    digests = []
    for heads in (2, 4, 2):
        ViTConfig(**sizes, num_attention_heads=heads).save_pretrained(tmp_path)
        torch.manual_seed(1)
        both = (
            library_network(f"hf:{tmp_path}", True).module,
            get_architecture(f"hf:{tmp_path}", PHOTOS),
        )
        digests.append([classifier_digest(one, {}) for one in both])
    assert digests[0] == digests[2] and not {*digests[0]} & {*digests[1]}


@needs("transformers")
def test_folder_that_lacks_a_last_layer_or_a_way_to_make_images_is_refused(tmp_path):
    from transformers import ResNetForImageClassification

    save_hf(tmp_path, do_flip_channel_order=True)
    words = "needs channels in another order or on another scale"
    refusal(library_network, f"hf:{tmp_path}", True, names=words)
    ResNetForImageClassification.from_pretrained(save_hf(tmp_path, size=8)).resnet.save_pretrained(
        tmp_path
    )
    absent = "has no weights of classifier.1.bias, classifier.1.weight"
    refusal(library_network, f"hf:{tmp_path}", True, names=f"{absent}: it is no trained")
    with pytest.warns(match=f"{absent}: these start at random"):
        made_architecture(f"hf:{tmp_path}", PHOTOS, "normalize", True)


@pytest.mark.parametrize("arch", ["googlenet", "inception_v3"])
def test_network_with_auxiliary_outputs_is_the_same_function_from_a_checkpoint(arch, monkeypatch):
    from torchvision import models

    saved = models.get_model(arch, weights=None, init_weights=False).state_dict()
    weights = type(models.get_model_weights(arch).DEFAULT)
    monkeypatch.setattr(weights, "get_state_dict", lambda self, *arguments, **options: saved)
    name, images, batch = (
        f"torchvision:{arch}",
        replace(PHOTOS, image_shape=(3, 80, 80)),
        torch.rand(2, 3, 80, 80),
    )
    images, trained = made_architecture(name, images, "normalize", True)
    assert trained(batch).shape == (2, 4)
    (rebuilt := get_architecture(name, images)).load_state_dict(trained.state_dict())
    with torch.inference_mode():
        assert torch.equal(rebuilt.eval()(batch), trained.eval()(batch))
