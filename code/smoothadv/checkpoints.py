"""Checkpoints, by the names that programs import."""

from smoothadv.models.checkpoint import read_checkpoint, save_checkpoint
from smoothadv.models.load import load_classifier

__all__ = ["load_classifier", "read_checkpoint", "save_checkpoint"]
