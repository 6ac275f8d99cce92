"""Adversarially trained smoothed classifiers with provable l2 robustness.

    import smoothadv
    rows = smoothadv.certify(model, images, labels, sigma=0.25, log="logs/mine.tsv")

Training follows SmoothAdv (Salman et al., NeurIPS 2019, "Provably Robust Deep Learning via
Adversarially Trained Smoothed Classifiers"); prediction and certification follow Cohen et al. (ICML
2019, "Certified Adversarial Robustness via Randomized Smoothing"). docs/architecture.md shows which
module does what and which may import which.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from smoothadv.version import __version__

if TYPE_CHECKING:
    from smoothadv.api import attack, certify, falsify, predict, train
    from smoothadv.base import plugins

__all__ = ["__version__", "attack", "certify", "falsify", "plugins", "predict", "train"]


def __getattr__(name: str) -> Any:
    """``plugins`` and the functions of ``smoothadv.api``, imported when first used: readers of logs
    need no torch.
    """
    if name == "plugins":
        return importlib.import_module("smoothadv.base.plugins")
    if name in __all__:
        from smoothadv import api

        return getattr(api, name)
    raise AttributeError(f"module 'smoothadv' has no attribute '{name}'")
