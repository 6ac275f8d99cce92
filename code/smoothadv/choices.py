"""The names that commands offer of what needs torch to be defined: a help text must not wait for torch."""

INPUT_LAYER_NAMES = ("normalize", "center")
"""Of ``architectures.INPUT_LAYERS``."""
PRECISION_NAMES = ("fp32", "bf16", "fp16")
"""Of ``smoothing.classifier.PRECISIONS``."""
