"""quantize export: the logits of an ONNX model are those of the network of integers, and what is
refused.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from smoothadv.datasets import get_dataset
from smoothadv.integer.export import as_onnx
from smoothadv.integer.layers import Convolution, Maximum, Rescaling, Step, Sum, Total
from smoothadv.integer.network import IntegerNetwork
from smoothadv.models.checkpoint import read_checkpoint, save_checkpoint
from smoothadv.models.load import integer_network
from smoothadv.noise import Purpose, RoundedGaussianNoise
from support.commands import call, refused, snapshot, succeed
from support.integers import convolution

onnx = pytest.importorskip("onnx", reason="onnx is not installed: there is no export")
onnxruntime = pytest.importorskip(
    "onnxruntime", reason="onnxruntime is not installed: nothing runs the export"
)
SHAPE = (3, 19, 15)


def network_of_all_layers() -> IntegerNetwork:
    """Max-pooling whose size is rounded up, groups, dilation, unequal strides, a shortcut, and two
    sums of several parts, whose multipliers are powers of 2: one has groups, with a bias apart.
    """
    pooling = {"kernel": (3, 2), "stride": (2, 2), "padding": (1, 0), "ceil_mode": 1}
    geometry = {"padding": (2, 1), "stride": (1, 2), "dilation": (1, 2)}
    steps = [
        Step(convolution(5, (10, 3, 3, 3), high=255, **geometry), (0,)),
        Step(Maximum(pooling, {}), (1,)),
        Step(convolution(6, (10, 10, 3, 3), low=-(2**14), high=2**14, padding=(1, 1)), (2,)),
        Step(Rescaling({"high": 2**14}, {"multiplier": torch.tensor([1.37])}), (2,)),
        Step(Sum({"low": -300, "high": 600}, {}), (3, 4)),
        Step(convolution(7, (4, 5, 1, 1), low=-200, high=200, groups=2), (5,)),
        Step(Total({"kernel": (11, 4)}, {}), (6,)),
        Step(convolution(8, (7, 4, 1, 1)), (7,)),
    ]
    divided, grouped = steps[2].layer, steps[5].layer
    divided.weight.mul_(60), divided.multiplier.fill_(2.0**-12)
    grouped.multiplier.fill_(2.0**-7)
    grouped.bias[0], grouped.multiplier[0] = 2**24 - 1, 2.0**-17
    network = IntegerNetwork(SHAPE, 383, torch.tensor([100, 120, 90]), steps).eval()
    assert divided.parts > 2 and grouped.parts > 1 and divided.has_powers and grouped.has_powers
    network.set_probe()
    return network


def network_of_a_shortcut(most: int) -> IntegerNetwork:
    """A block of bytes, with weights up to ``most``, which some reach."""
    byte = {"high": 255, "padding": (1, 1), "powers": True}
    steps = [
        Step(convolution(0, (8, 3, 3, 3), **byte), (0,)),
        Step(convolution(1, (8, 8, 3, 3), **byte), (1,)),
        Step(convolution(2, (8, 8, 3, 3), shortcut=1, **byte), (2, 1)),
        Step(Total({"kernel": (5, 5)}, {}), (3,)),
        Step(convolution(3, (4, 8, 1, 1)), (4,)),
    ]
    for step in steps[:3]:
        step.layer.weight[0, 0, 0, 0] = most
    return IntegerNetwork((3, 5, 5), 383, torch.tensor([125, 0, 255]), steps).eval()


@pytest.fixture(scope="module")
def all_layers(tmp_path_factory) -> Path:
    """A checkpoint of ``network_of_all_layers``."""
    path, (record, tensors) = (
        tmp_path_factory.mktemp("all") / "integers.pth.tar",
        network_of_all_layers().stored(),
    )
    content = {
        "epoch": 1,
        "arch": "integer:all",
        "classes": list("abcdefg"),
        "image_shape": list(SHAPE),
    }
    save_checkpoint(path, {**content, "integer": record, "state_dict": tensors})
    return path


def noisy_images(name: str) -> torch.Tensor:
    """256 images: of digits with noise, or random grey levels, a few of them beyond what is
    clipped.
    """
    if name == "all_layers":
        levels = np.random.default_rng(0).integers(-500, 756, (256, *SHAPE))
        return torch.from_numpy(levels).float() / 255
    images, noise = get_dataset("digits", "test"), RoundedGaussianNoise(0.25, 0)
    streams = [
        (noise.stream(index, "cpu", Purpose.EVALUATION), images[index][0]) for index in range(128)
    ]
    return torch.cat([stream.noisy(2, image) for stream, image in streams])


def multiplied(network: IntegerNetwork) -> list[torch.nn.Module]:
    """The layers whose multipliers are not in weights; behind them stands that of the image."""
    in_weights = {
        layer
        for layer in network.layers
        if isinstance(layer, Convolution) and layer.has_powers and layer.parts == 1
    }
    return [
        layer
        for layer in network.layers
        if hasattr(layer, "multiplier") and layer not in in_weights
    ]


@pytest.mark.parametrize("name", ["integers", "all_layers"])
def test_onnx_runtime_computes_the_same_logits_of_a_model_that_says_what_it_is(
    name, request, tmp_path, capsys
):
    """However it optimizes the graph, which must leave multipliers apart: taken into weights, they
    rarely show.
    """
    checkpoint, out = request.getfixturevalue(name), tmp_path / "new" / "integers.onnx"
    done = call(capsys, "quantize", "export", checkpoint, out)
    assert (
        done.code == 0
        and f"{onnxruntime.__version__} computes the probe's logits exactly" in done.out
    )
    content = read_checkpoint(checkpoint)
    facts = content["image_shape"], len(content["classes"])
    network, images = integer_network(content, checkpoint, *facts), noisy_images(name)
    with torch.inference_mode():
        expected = network(images)
    assert len(expected.unique(dim=0)) > 250
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.optimized_model_filepath, options.log_severity_level = str(tmp_path / level), 3
        session = onnxruntime.InferenceSession(out, options, providers=["CPUExecutionProvider"])
        found = np.concatenate(
            [session.run(None, {"images": some.numpy()})[0] for some in images.split(100)]
        )
        assert torch.equal(torch.from_numpy(found), expected), level
        graphs = [onnx.load(path).graph.node for path in (out, tmp_path / level)]
        written, executed = ([node.op_type for node in graph].count("Mul") for graph in graphs)
        assert written == executed == len(multiplied(network)) + 1, level
    in_bytes = [node.op_type for node in graphs[1]].count("QLinearConv")
    assert in_bytes == {"integers": 3, "all_layers": 0}[name], "one in each block"
    model = onnx.load(out)
    facts = {each.key: each.value for each in model.metadata_props}
    assert (facts["definition"], json.loads(facts["classes"])) == ("2", content["classes"])
    assert facts["probe"] == content["integer"]["probe"] and len(facts["checkpoint_sha256"]) == 64
    assert {(each.domain, each.version) for each in model.opset_import} == {("", 13)}


def logits_of(model: object, images: torch.Tensor) -> np.ndarray:
    """By ONNX Runtime, optimized."""
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=providers)
    return session.run(None, {"images": images.numpy()})[0]


@pytest.mark.parametrize(("most", "kind"), [(64, "INT8"), (65, "FLOAT"), (127, "FLOAT")])
def test_weights_are_bytes_only_where_no_processor_saturates(most, kind):
    """Two products of 255 and 65 exceed 2^15."""
    network = network_of_a_shortcut(most)
    model = as_onnx(network, {}, onnx)
    constants = {one.name: one.data_type for one in model.graph.initializer}
    made_by = {node.output[0]: node for node in model.graph.node}
    weights = [node.input[1] for node in model.graph.node if node.op_type == "Conv"][1:3]
    found = [made_by[name].input[0] if name in made_by else name for name in weights]
    assert {constants[name] for name in found} == {getattr(onnx.TensorProto, kind)}
    images = torch.cat([network.probe_images(), torch.full((1, 3, 5, 5), 2.5)])
    with torch.inference_mode():
        assert np.array_equal(logits_of(model, images), network(images).numpy())


def test_images_with_a_nan_have_no_class():
    """As in PyTorch; bytes of a NaN would be a number."""
    network = network_of_a_shortcut(64)
    images = network.probe_images()
    images[1, 2, 4, 3], images[2, 0, 0, 0], images[3, 0, 0, 0] = torch.nan, torch.inf, -torch.inf
    found = logits_of(as_onnx(network, {}, onnx), images)
    with torch.inference_mode():
        expected = network(images).numpy()
    assert np.isnan(found[1]).all() and np.isfinite(np.delete(found, 1, 0)).all()
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("name", ["3.weight", "2.multiplier", "mean"])
def test_changed_checkpoint_is_noticed_and_nothing_written(integers, tmp_path, capsys, name):
    content = torch.load(integers, weights_only=True)
    content["state_dict"][name] = changed = content["state_dict"][name].contiguous()
    changed.view(-1)[0] += 1
    torch.save(content, tmp_path / "other.pth.tar")
    before, done = (
        snapshot(tmp_path),
        call(capsys, "quantize", "export", tmp_path / "other.pth.tar", tmp_path / "o"),
    )
    assert refused(done, "not written", "the checkpoint's probe") and snapshot(tmp_path) == before


def test_without_the_packages(integers, tmp_path, capsys, monkeypatch):
    out = tmp_path / "integers.onnx"
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert (
        "onnxruntime is not installed, so no logits"
        in call(capsys, "quantize", "export", integers, out).out
    )
    written = out.read_bytes()
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert refused(
        call(capsys, "quantize", "export", integers, out, "--overwrite"),
        'pip install "smoothadv[onnx]"',
    )
    assert out.read_bytes() == written


def test_only_a_model_is_replaced_and_only_if_asked(integers, checkpoint, workplace, capsys):
    export = ("quantize", "export")
    succeed(*export, integers, "integers.onnx")
    assert refused(call(capsys, *export, integers, "integers.onnx"), "--overwrite")
    succeed(*export, integers, "integers.onnx", "--overwrite")
    Path("notes.txt").write_text("dear diary")
    assert refused(call(capsys, *export, integers, "notes.txt", "--overwrite"), "notes.txt")
    of_floats = call(capsys, *export, checkpoint, "integers.onnx", "--overwrite")
    assert refused(of_floats, "lacks the fields integer")
    assert Path("notes.txt").read_text() == "dear diary"
