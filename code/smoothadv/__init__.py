"""Adversarially trained smoothed classifiers with provable l2 robustness.

Training follows SmoothAdv (Salman et al., NeurIPS 2019, "Provably Robust Deep Learning via
Adversarially Trained Smoothed Classifiers"); prediction and certification follow Cohen et al. (ICML
2019, "Certified Adversarial Robustness via Randomized Smoothing"). docs/architecture.md shows which
module does what and which may import which.
"""

__version__ = "0.1.0"
