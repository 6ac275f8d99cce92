"""Small classifiers whose smoothed versions, gradients and closest adversarial examples are known
in closed form.
"""

import torch
from torch import nn

# A linear classifier and an input of margin 4, hence at distance 0.8 from the decision boundary.
WEIGHT, BIAS, POINT = (3.0, 4.0), -1.0, (1.0, 0.5)
MARGIN, DISTANCE = 4.0, 0.8


class LinearClassifier(nn.Module):
    """Class 1 where s = w.x + b > 0, for inputs of any shape [B, ...] with as many numbers as w.

    Logits (-s / 2, s / 2): the gradient of the loss survives in either logit where one probability
    rounds to 1.
    """

    def __init__(self, weight, bias: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.as_tensor(weight, dtype=dtype))
        self.bias = nn.Parameter(torch.tensor(bias, dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        score = self.score(inputs)
        return torch.stack([-score / 2, score / 2], dim=1)

    def score(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.flatten(1) @ self.weight + self.bias


class ProbitClassifier(LinearClassifier):
    """A softmax that gives class 1 the probability Phi(w.x + b): its Gaussian average is again a
    Phi.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        score = self.score(inputs)
        return torch.stack([torch.special.log_ndtr(-score), torch.special.log_ndtr(score)], dim=1)


class ConstantClassifier(nn.Module):
    """The class ``answer`` everywhere; the graph reaches the inputs, with a gradient of zero."""

    def __init__(self, answer: int, num_classes: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.eye(num_classes)[answer])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.flatten(1).sum(1, keepdim=True) * 0 + self.logits.to(inputs.dtype)


class IntervalClassifier(nn.Module):
    """The number of thresholds below the first coordinate."""

    def __init__(self, *thresholds: float) -> None:
        super().__init__()
        self.register_buffer("thresholds", torch.tensor(thresholds))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        classes = torch.bucketize(inputs.flatten(1)[:, 0].contiguous(), self.thresholds)
        return nn.functional.one_hot(classes, len(self.thresholds) + 1).float()


class Recorder(nn.Module):
    """Another model, remembering every batch it was given and whether it was in train mode then."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.batches: list[torch.Tensor] = []
        self.modes: list[bool] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.batches.append(inputs.detach().clone())
        self.modes.append(self.training)
        return self.model(inputs)


def linear_classifier(
    weight=WEIGHT, bias: float = BIAS, dtype: torch.dtype = torch.float64
) -> LinearClassifier:
    return LinearClassifier(weight, bias, dtype)


def probit_classifier(
    weight=WEIGHT, bias: float = BIAS, dtype: torch.dtype = torch.float64
) -> ProbitClassifier:
    return ProbitClassifier(weight, bias, dtype)


def random_linear_classifier(dimension: int, num_classes: int, seed: int) -> nn.Module:
    """A linear classifier of several classes with random float32 weights."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(dimension, num_classes)
    with torch.no_grad():
        layer.weight.normal_(generator=generator)
        layer.bias.normal_(generator=generator)
    return nn.Sequential(nn.Flatten(), layer)


def network_with_state(channels: int = 1, num_classes: int = 3) -> nn.Sequential:
    """Batch normalization first, so that its statistics are those of the inputs; then a layer on
    channel means.
    """
    means = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(nn.BatchNorm2d(channels), *means, nn.Linear(channels, num_classes))
