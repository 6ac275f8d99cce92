"""What the kernels of this machine compute in float32."""

import os

import torch


def only_adds(device: str) -> bool:
    """Whether float32 convolutions on a type of device multiply and add numbers as they are, and do
    nothing else.

    Those of cuDNN and NNPACK may be Winograd's, or round what they multiply to TF32. Those of
    oneDNN are direct, and do not round, unless a setting asks for it.
    """
    mkldnn = torch.backends.mkldnn
    settings = {
        getattr(getattr(mkldnn, "conv", None), "fp32_precision", "none"),
        os.environ.get("ONEDNN_DEFAULT_FPMATH_MODE", "strict").lower(),
        os.environ.get("DNNL_DEFAULT_FPMATH_MODE", "strict").lower(),
    }
    return (
        device == "cpu"
        and mkldnn.is_available()
        and bool(mkldnn.enabled)
        and settings <= {"none", "ieee", "strict"}
    )


# What torch.compiler.assume_constant_result does, without its import of the compiler.
vars(only_adds)["_dynamo_marked_constant"] = True
