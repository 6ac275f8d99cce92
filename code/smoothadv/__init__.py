"""Adversarially trained smoothed classifiers with provable l2 robustness.

    import smoothadv
    rows = smoothadv.certify(model, images, labels, sigma=0.25, log="logs/mine.tsv")
    smoothadv.table("logs/mine.tsv", radii=[0, 0.25])

Training follows SmoothAdv (Salman et al., NeurIPS 2019, "Provably Robust Deep Learning via
Adversarially Trained Smoothed Classifiers"); prediction and certification follow Cohen et al. (ICML
2019, "Certified Adversarial Robustness via Randomized Smoothing"). Every analysis of the command
``analyze``, also one of a plug-in, is a function of logs. docs/architecture.md shows which module
does what and which may import which.
"""

import importlib
from typing import TYPE_CHECKING, Any

from smoothadv.version import __version__

if TYPE_CHECKING:
    from smoothadv.api import attack, certify, falsify, predict, train
    from smoothadv.base import plugins
    from smoothadv.core import Smooth
    from smoothadv.smoothed_module import SmoothedModule
    from smoothadv.statistics.votes import certify_votes, predict_votes

_MODULES = {
    "Smooth": "smoothadv.core",
    "SmoothedModule": "smoothadv.smoothed_module",
    **dict.fromkeys(("certify_votes", "predict_votes"), "smoothadv.statistics.votes"),
    **dict.fromkeys(("attack", "certify", "falsify", "predict", "train"), "smoothadv.api"),
}
_ANALYSES = (
    "cascade compare empirical envelope examples gap heat_map held_out parameters plot "
    "plot_empirical plot_envelope plot_training probabilities report summary table"
).split()

__all__ = [
    "Smooth",
    "SmoothedModule",
    "__version__",
    "attack",
    "certify",
    "certify_votes",
    "falsify",
    "plugins",
    "predict",
    "predict_votes",
    "train",
]


def __getattr__(name: str) -> Any:
    """``plugins``, ``Smooth`` and the functions, imported when first used: readers of logs need no
    torch.
    """
    if name == "plugins":
        return importlib.import_module("smoothadv.base.plugins")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if not name.startswith("_"):
        if name in _added():
            return _added()[name].load()
        from smoothadv.analysis import ANALYSES, function_of

        if name in ANALYSES:
            return function_of(name)
    raise AttributeError(f"module 'smoothadv' has no attribute '{name}'")


def _added() -> Any:
    """The functions of annexes."""
    from smoothadv.base import registry

    registry.load_annexes()
    return registry.FUNCTIONS


def __dir__() -> list[str]:
    return sorted({*__all__, *_ANALYSES, *_added()})
