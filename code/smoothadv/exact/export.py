"""Writes a network of integers as an ONNX model, whose logits are those of the network bit for bit.

Tensors are float32 and hold integers, as in the definition. Optimizers of graphs may multiply the
weights of a convolution with constants that its result is multiplied with, which would round them:
a rounding between the two, which changes no integer, prevents it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from smoothadv.base.digests import file_digest
from smoothadv.base.errors import UserError, first_line
from smoothadv.base.files import refuse_to_replace, reserved, write_atomically
from smoothadv.checkpoints import INTEGER, integer_network, read_checkpoint
from smoothadv.exact.layers import Convolution, Maximum, Rescaling, Sum, Total
from smoothadv.exact.network import (
    DEFINITION,
    WHITE,
    IntegerNetwork,
    digest_of_logits,
)
from smoothadv.version import __version__

OPSET, _FORMAT, _NAME = 13, 7, "smoothadv"
_START = (
    bytes([8, _FORMAT, 18, len(_NAME)]) + _NAME.encode()
)  # of a file: the format's version, and who produced it


def export(checkpoint: Path, outfile: Path, overwrite: bool = False) -> str | None:
    """Write the network of a checkpoint of integers to ``outfile``, whose folder is made; returns
    which ONNX Runtime computed the logits of the probe exactly, None where it is not installed.

    UserError, and nothing is written, where onnx is not installed, the checkpoint is none of
    integers, ``outfile`` is another file (or exists, without ``overwrite``), or ONNX Runtime
    computes other logits.
    """
    try:
        import onnx
    except ImportError as error:
        raise UserError('the export needs onnx: pip install "smoothadv[onnx]" or onnx') from error
    refuse_to_replace(outfile, "ONNX model of smoothadv", _START)
    content = read_checkpoint(checkpoint)
    if missing := [name for name in (INTEGER, "image_shape", "classes") if name not in content]:
        lacks = f"it lacks the fields {', '.join(missing)}"
        raise UserError(
            f"checkpoint {checkpoint} is none of integers, as quantize makes it of a trained one: "
            f"{lacks}"
        )
    network = integer_network(content, checkpoint, content["image_shape"], len(content["classes"]))
    facts = {
        "definition": str(DEFINITION),
        "classes": json.dumps(content["classes"]),
        "probe": network.probe,
        "checkpoint_sha256": file_digest(checkpoint),
    }
    model = as_onnx(network, facts, onnx)
    onnx.checker.check_model(model, full_check=True)
    serialized = model.SerializeToString(deterministic=True)
    with reserved(outfile, overwrite):
        version = _check_with_runtime(serialized, network, outfile)
        write_atomically(outfile, lambda file: file.write(serialized))
    return version


def as_onnx(network: IntegerNetwork, facts: dict[str, str], onnx: Any) -> Any:
    """The ModelProto of a network: "images" [batch, C, H, W], in [0, 1] but for noise, to "logits"
    [batch, K], float32.

    ``facts`` become its metadata; ``onnx`` is the package.
    """
    helper, writer = onnx.helper, _Writer(onnx)
    with torch.inference_mode():
        names = [writer.entrance(network)]
        values = [torch.zeros(1, *network.image_shape)]
        for layer, inputs in zip(network.layers, network.inputs):
            values.append(layer(*(values[used].clone() for used in inputs)))
            arguments = [names[used] for used in inputs]
            names.append(
                getattr(writer, type(layer).__name__.lower())(
                    layer, arguments, values[inputs[0]], values[-1]
                )
            )
    writer.node("Flatten", names[-1], outputs=["logits"], axis=1)
    images, logits = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", *shape])
        for name, shape in (("images", network.image_shape), ("logits", [values[-1].numel()]))
    )
    graph = helper.make_graph(writer.nodes, "integers", [images], [logits], writer.constants)
    opset, producer = (
        [helper.make_opsetid("", OPSET)],
        {"producer_name": _NAME, "producer_version": __version__},
    )
    model = helper.make_model(graph, opset_imports=opset, ir_version=_FORMAT, **producer)
    helper.set_model_props(model, facts)
    return model


def _check_with_runtime(model: bytes, network: IntegerNetwork, outfile: Path) -> str | None:
    """The version of ONNX Runtime, None without; UserError where its logits of the probe, on the
    CPU, are not exact.
    """
    try:
        import onnxruntime
    except ImportError:
        return None
    try:
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        (logits,) = session.run(["logits"], {"images": network.probe_images().numpy()})
    except Exception as error:  # its exceptions have no common base
        raise UserError(
            f"{outfile} is not written: ONNX Runtime cannot run it: {first_line(error)}"
        ) from error
    if digest_of_logits(torch.from_numpy(logits)) != network.probe:
        found = (
            f"ONNX Runtime {onnxruntime.__version__} does not compute the network exactly on this "
            "machine"
        )
        raise UserError(
            f"{outfile} is not written: {found}, or the checkpoint's probe is that of another "
            "network"
        )
    return onnxruntime.__version__


class _Writer:
    """Collects nodes and constants. A method for each kind of layer, named as in LAYERS, returns
    its result's name.

    It is given the layer, the names of its arguments, and the first of these and the result for one
    image.
    """

    def __init__(self, onnx: Any) -> None:
        self.onnx = onnx
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: Any, dtype: torch.dtype = torch.float32) -> str:
        name = f"constant{len(self.constants)}"
        array = torch.as_tensor(value, dtype=dtype).contiguous().numpy()
        self.constants.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def node(self, kind: str, *inputs: str, outputs: Sequence[str] = (), **attributes: Any) -> str:
        names = list(outputs) or [f"value{len(self.nodes)}"]
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, names, **attributes))
        return names[0]

    def cast(self, value: str, kind: str) -> str:
        return self.node("Cast", value, to=getattr(self.onnx.TensorProto, kind))

    def clip(self, value: str, low: int, high: int) -> str:
        return self.node("Clip", value, self.constant(low), self.constant(high))

    def entrance(self, network: IntegerNetwork) -> str:
        levels = self.node("Round", self.node("Mul", "images", self.constant(WHITE)))
        return self.node(
            "Sub",
            self.clip(levels, -network.clip, WHITE + network.clip),
            self.constant(network.mean),
        )

    def convolution(
        self, layer: Convolution, names: Sequence[str], x: torch.Tensor, y: torch.Tensor
    ) -> str:
        shape: dict[str, Any] = {
            "strides": layer.stride,
            "dilations": layer.dilation,
            "group": layer.groups,
        }
        shape["pads"] = layer.padding * 2
        if layer.parts == 1:
            total = self.node(
                "Conv", names[0], self.constant(layer.weight), self.constant(layer.bias), **shape
            )
            total = self.node("Round", total)  # keeps the multiplier out of the weights
        else:
            weights = layer.weight.split(-(-x.shape[1] // layer.parts), 1)
            parts = [f"value{len(self.nodes)}.{number}" for number in range(len(weights))]
            sizes = self.constant([weight.shape[1] for weight in weights], torch.int64)
            self.node("Split", names[0], sizes, outputs=parts, axis=1)
            sums = [
                self.node("Conv", part, self.constant(weight), **shape)
                for part, weight in zip(parts, weights)
            ]
            bias = self.constant(layer.bias[:, None, None], torch.float64)
            total = self.cast(
                self.node("Sum", bias, *(self.cast(one, "DOUBLE") for one in sums)), "FLOAT"
            )
        scaled = self.node("Mul", total, self.constant(layer.multiplier[:, None, None]))
        return (
            scaled
            if layer.is_last
            else self.clip(self.node("Round", scaled), layer.low, layer.high)
        )

    def rescaling(
        self, layer: Rescaling, names: Sequence[str], x: torch.Tensor, y: torch.Tensor
    ) -> str:
        scaled = self.node("Mul", names[0], self.constant(layer.multiplier))
        return self.clip(self.node("Round", scaled), layer.low, layer.high)

    def sum(self, layer: Sum, names: Sequence[str], x: torch.Tensor, y: torch.Tensor) -> str:
        return self.clip(self.node("Add", *names), layer.low, layer.high)

    def maximum(
        self, layer: Maximum, names: Sequence[str], x: torch.Tensor, y: torch.Tensor
    ) -> str:
        reach = [size * step - step + 1 for size, step in zip(layer.kernel, layer.dilation)]
        each = zip(x.shape[2:], y.shape[2:], layer.stride, reach, layer.padding)
        # Padding behind the map that makes the size right, so that no rule for rounding it up is
        # needed.
        behind = [
            max(0, (new - 1) * step + size - old - before) for old, new, step, size, before in each
        ]
        shape: dict[str, Any] = {
            "kernel_shape": layer.kernel,
            "strides": layer.stride,
            "dilations": layer.dilation,
        }
        return self.node("MaxPool", names[0], pads=[*layer.padding, *behind], **shape)

    def total(self, layer: Total, names: Sequence[str], x: torch.Tensor, y: torch.Tensor) -> str:
        return self.node("ReduceSum", names[0], self.constant([2, 3], torch.int64), keepdims=1)
