"""Writes a network of integers as an ONNX model, whose logits are those of the network bit for bit.

Tensors are float32 and hold integers, as in the definition. What is clamped to 0..255 is quantized
to bytes and dequantized, both with a scale of 1, and so are weights and biases with their
multipliers, where these are powers of 2: a runtime may compute the nodes as they are, or
convolutions of bytes with fused operators instead, and rounds nothing else in either. Optimizers of
graphs may multiply other multipliers into a convolution's weights, which would round them: the sum
is int32 between the two, which prevents it.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from smoothadv.architectures.integers import digest_of_logits
from smoothadv.base.errors import UserError, first_line, optional_module
from smoothadv.base.files import refuse_to_replace, reserved, write_atomically
from smoothadv.integer.layers import DEFINITION, SEVEN_BITS, WHITE
from smoothadv.integer.network import IntegerNetwork
from smoothadv.models.checkpoint import INTEGER, read_checkpoint
from smoothadv.models.contents import checkpoint_digest
from smoothadv.models.load import integer_network
from smoothadv.version import __version__

OPSET, _FORMAT, _NAME = 13, 7, "smoothadv"
# A file begins with the format's version and the producer.
_START = bytes([8, _FORMAT, 18, len(_NAME)]) + _NAME.encode()


def export(checkpoint: Path, outfile: Path, overwrite: bool = False) -> str | None:
    """Write the network of a checkpoint of integers to ``outfile``, whose folder is made; returns
    which ONNX Runtime computed the logits of the probe exactly, None where it is not installed.

    UserError, and nothing is written, where onnx is not installed, the checkpoint is none of
    integers, ``outfile`` is another file (or exists, without ``overwrite``), or ONNX Runtime
    computes other logits.
    """
    onnx = optional_module("onnx", 'the export needs onnx: pip install "smoothadv[onnx]" or onnx')
    refuse_to_replace(outfile, "ONNX model of smoothadv", _START)
    content = read_checkpoint(checkpoint)
    if missing := [name for name in (INTEGER, "image_shape", "classes") if name not in content]:
        raise UserError(
            f"checkpoint {checkpoint} is none of integers, as quantize makes it of a trained one: "
            f"it lacks the fields {', '.join(missing)}"
        )
    network = integer_network(content, checkpoint, content["image_shape"], len(content["classes"]))
    assert isinstance(network, IntegerNetwork)
    facts = {
        "definition": str(DEFINITION),
        "classes": json.dumps(content["classes"]),
        "probe": network.probe,
        "checkpoint_sha256": checkpoint_digest(checkpoint),
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
    helper, writer, shape = onnx.helper, Writer(onnx), network.image_shape
    with torch.inference_mode():
        names, values = [writer.entrance(network)], network.maps(torch.zeros(1, *shape))
        for number, layer, inputs in network.steps():
            arguments = [names[used] for used in inputs]
            names.append(layer.onnx(writer, arguments, values[inputs[0]], values[number]))
    writer.logits(names[-1])
    images, logits = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", *sizes])
        for name, sizes in (("images", shape), ("logits", [values[-1].numel()]))
    )
    graph = helper.make_graph(writer.nodes, "integers", [images], [logits], writer.constants)
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=_FORMAT,
        producer_name=_NAME,
        producer_version=__version__,
    )
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
        raise UserError(
            f"{outfile} is not written: ONNX Runtime {onnxruntime.__version__} does not compute "
            "the network exactly on this machine, or the checkpoint's probe is that of another "
            "network"
        )
    return onnxruntime.__version__


class Writer:
    """Collects nodes and constants; layers add theirs (``IntegerLayer.onnx``)."""

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

    def split(self, value: str, sizes: str, count: int) -> list[str]:
        """The names of ``count`` parts of the channels, whose numbers are in ``sizes``."""
        names = [f"value{len(self.nodes)}.{number}" for number in range(count)]
        self.node("Split", value, sizes, outputs=names, axis=1)
        return names

    def cast(self, value: str, kind: str) -> str:
        return self.node("Cast", value, to=getattr(self.onnx.TensorProto, kind))

    def dequantized(self, integers: torch.Tensor, scales: torch.Tensor, kind: torch.dtype) -> str:
        """Integers [O, ...] of a type, times the scales [O]."""
        given = self.constant(integers, kind), self.constant(scales)
        return self.node("DequantizeLinear", *given, axis=0)

    def scaled(self, weight: torch.Tensor, scales: torch.Tensor) -> str:
        """A weight [O, ...] times the scales [O]: bytes, if they have 7 bits.

        ONNX Runtime would quantize others again if the bias beside them was no dequantized one.
        """
        if float(weight.abs().max()) <= SEVEN_BITS:
            return self.dequantized(weight, scales, torch.int8)
        return self.constant(weight * scales.view(-1, *[1] * (weight.dim() - 1)))

    def rounded(self, value: str, layer: Any) -> str:
        """A value rounded to integers in the range of a layer; 0..255 become bytes."""
        if (layer.low, layer.high) == (0, WHITE):
            scale = self.constant(1.0), self.constant(0, torch.uint8)
            return self.node("DequantizeLinear", self.node("QuantizeLinear", value, *scale), *scale)
        limits = self.constant(layer.low), self.constant(layer.high)
        return self.node("Clip", self.node("Round", value), *limits)

    def logits(self, found: str) -> None:
        """The results of the last layer, as ``numbers_of`` says."""
        is_nan = self.cast(self.node("IsNaN", "images"), "FLOAT")
        holds_nan = self.node("ReduceMax", is_nan, axes=[1, 2, 3], keepdims=0)
        holds_nan = self.node("Unsqueeze", holds_nan, self.constant([1], torch.int64))
        values = self.constant(math.nan), self.node("Flatten", found, axis=1)
        self.node("Where", self.cast(holds_nan, "BOOL"), *values, outputs=["logits"])

    def entrance(self, network: IntegerNetwork) -> str:
        levels = self.node("Round", self.node("Mul", "images", self.constant(WHITE)))
        low, high = self.constant(-network.clip), self.constant(WHITE + network.clip)
        return self.node("Sub", self.node("Clip", levels, low, high), self.constant(network.mean))
