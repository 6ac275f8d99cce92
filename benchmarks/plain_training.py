"""The released code's SmoothAdv update, written as simply as possible: the reference for speed and
losses.

It runs in eager float32 or float64, channels first. It attacks the model itself, in eval mode with
frozen parameters, and reads loss and accuracy from the device in every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

Attack = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def label_loss(
    model: torch.nn.Module, points: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor
) -> tuple:
    """-log of the mean probability of the label over m copies, [B], and the logits [B, m, K]; noise
    is [B, m, ...].
    """
    copies = noise.shape[1]
    repeated = points.repeat((1, copies, 1, 1)).view(-1, *points.shape[1:])
    logits = model(repeated + noise.reshape(repeated.shape)).view(len(points), copies, -1)
    if copies == 1:
        return F.cross_entropy(logits[:, 0], labels, reduction="none"), logits
    mean = F.softmax(logits, dim=2).mean(1)
    return F.nll_loss(torch.log(mean.clamp(min=1e-20)), labels, reduction="none"), logits


def norms(v: torch.Tensor) -> torch.Tensor:
    """The l2 norms of a batch [B, C, H, W], in shape [B, 1, 1, 1]."""
    return v.view(len(v), -1).norm(p=2, dim=1).view(-1, 1, 1, 1)


def pgd(epsilon: float, steps: int) -> Attack:
    """Projected gradient descent: steps of 2 epsilon / T along the unit gradient."""

    def attack(
        model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        v = torch.zeros_like(images)
        for _ in range(steps):
            v.requires_grad_()
            loss, _ = label_loss(model, images + v, labels, noise)
            (gradient,) = torch.autograd.grad(loss.sum(), v)
            v = v.detach() + 2 * epsilon / steps * gradient / norms(gradient)
            v = (images + v).clamp(0, 1) - images
            v = v * (epsilon / norms(v)).clamp(max=1)
        return (images + v).detach()

    return attack


def ddn(epsilon: float, steps: int, gamma: float = 0.05, initial_norm: float = 1.0) -> Attack:
    """Decoupled direction and norm, with a gradient for every iterate of every example; no
    quantization.
    """

    def attack(
        model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        v = torch.zeros_like(images)
        worst = norms(torch.max(images, 1 - images))
        norm = torch.full_like(worst, initial_norm)
        best, best_norm = torch.zeros_like(images), worst
        for step in range(steps):
            v.requires_grad_()
            loss, logits = label_loss(model, images + v, labels, noise)
            (gradient,) = torch.autograd.grad(loss.sum(), v)
            v = v.detach()
            adversarial = (logits.argmax(2).mode(1)[0] != labels).view(-1, 1, 1, 1)
            better = adversarial & (norms(v) < best_norm)
            best, best_norm = torch.where(better, v, best), torch.where(better, norms(v), best_norm)
            length = 0.01 + 0.495 * (1 + math.cos(math.pi * step / max(1, steps - 1)))
            v = v + length * gradient / norms(gradient)
            norm = torch.min(
                torch.where(adversarial, norm * (1 - gamma), norm * (1 + gamma)), worst
            )
            v = (images + v * norm / norms(v)).clamp(0, 1) - images
        return (images + best * (epsilon / norms(best)).clamp(max=1).nan_to_num(1)).detach()

    return attack


def update(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    noise: torch.Tensor,
    attack: Attack,
) -> dict[str, float]:
    """Attack a batch [B, C, H, W] on noise [B, m, C, H, W], train on the m copies, and read loss
    and accuracies.
    """
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    adversarial = attack(model, images, labels, noise)
    model.train()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    copies = noise.shape[1]
    inputs = adversarial.repeat((1, copies, 1, 1)).view(-1, *images.shape[1:]) + noise.reshape(
        -1, *images.shape[1:]
    )
    targets = labels.unsqueeze(1).repeat(1, copies).reshape(-1)
    outputs = model(inputs)
    loss = F.cross_entropy(outputs, targets)
    ranks = outputs.topk(min(5, outputs.shape[1]), 1)[1].eq(targets[:, None])
    seen = {"loss": loss.item(), "top1": ranks[:, :1].sum().item(), "top5": ranks.sum().item()}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return seen
