"""``onnx:FILE``: a network that ONNX Runtime computes, in float32 and without gradients;
normalization is inside it.
"""

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smoothadv.architectures.libraries import LIBRARIES, LibraryNetwork
from smoothadv.base.errors import UserError, first_line
from smoothadv.base.files import digest
from smoothadv.datasets import DatasetDescription


class OnnxNetwork(nn.Module):
    """Maps float images [B, C, H, W] in [0, 1] to the first output of the network in ``file``,
    float32 [B, K].

    A file for batches of one size gets chunks of this size, the last one padded with zeros. Copies
    share the session; the buffer ``sha256`` uint8 [32] is the digest of the file, and of those
    beside it that hold its weights.
    """

    def __init__(self, file: str) -> None:
        import onnxruntime

        super().__init__()
        content = Path(file).read_bytes()
        places = re.finditer(
            rb"\x0a\x08location\x12(.)", content, re.DOTALL
        )  # "location" and the length of its text
        names = {os.fsdecode(content[one.end() : one.end() + one[1][0]]) for one in places}
        try:
            parts = [content, *((Path(file).parent / name).read_bytes() for name in sorted(names))]
        except (OSError, ValueError) as error:
            raise UserError(
                f"onnx:{file}: its weights cannot be read: {first_line(error)}"
            ) from error
        sha256 = torch.tensor(list(bytes.fromhex(digest(parts))), dtype=torch.uint8)
        self.sha256 = nn.Buffer(sha256)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.file, self._session = file, onnxruntime.InferenceSession(file, options)
        (image, *others) = self._session.get_inputs()
        if others or image.type != "tensor(float)" or len(image.shape) != 4:
            found = ", ".join(f"{one.name} {one.type} {one.shape}" for one in (image, *others))
            raise UserError(
                f"onnx:{file} takes {found}, expected float32 images [B, C, H, W] alone"
            )
        self._input, batch = image.name, image.shape[0]
        self._chunk = batch if isinstance(batch, int) else None

    def __deepcopy__(self, memo: Any) -> "OnnxNetwork":
        return self

    def refuse_gradients(self) -> None:
        """UserError: there are none."""
        raise UserError(
            f"onnx:{self.file} has no gradients: attack it with --gradient stein or hard-stein"
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.requires_grad and torch.is_grad_enabled():
            self.refuse_gradients()
        if images.dtype not in (torch.float32, torch.float64):
            raise UserError(f"onnx:{self.file} computes in float32: leave --precision out")
        chunks = images.detach().float().cpu().split(self._chunk or len(images))
        return torch.cat([self._logits(chunk) for chunk in chunks]).to(images.device)

    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        missing = (self._chunk or len(images)) - len(images)
        padded = torch.cat([images, images.new_zeros(missing, *images.shape[1:])]).contiguous()
        try:
            output = self._session.run(None, {self._input: padded.numpy()})[0]
        except Exception as error:  # ONNX Runtime's own, also for images of another shape
            raise ValueError(f"ONNX Runtime: {' '.join(str(error).split())}") from error
        if output.shape[:1] != (len(padded),):
            raise UserError(
                f"onnx:{self.file} makes {list(output.shape)} of a batch of {len(padded)}, "
                "expected [B, K]"
            )
        return torch.from_numpy(output)[: len(images)]


@LIBRARIES.register("onnx")
def onnx_network(
    location: str, pretrained: bool, images: DatasetDescription | None
) -> LibraryNetwork:
    """The network in an ONNX file, for evaluation with the weights that it holds."""
    import onnxruntime

    if images is not None:
        raise UserError(f"onnx:{location} is for evaluation: ONNX Runtime does not train")
    if not Path(location).is_file():
        raise UserError(f"onnx:{location}: there is no such file")
    return LibraryNetwork(OnnxNetwork(location), f"onnxruntime {onnxruntime.__version__}")
