"""The names that commands offer of what needs torch to be defined: a help text must not wait for
torch.
"""

INPUT_LAYER_NAMES = ("normalize", "center", "none")
"""Of ``architectures.INPUT_LAYERS``."""
EXISTING = ("resume", "overwrite", "refuse")
"""What to do with a log, or a training run, that exists already."""
PRECISION_NAMES = ("fp32", "bf16", "fp16")
"""Of ``voting.classifier.PRECISIONS``."""
