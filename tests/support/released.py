"""The released code's CIFAR residual network, input layers and checkpoint files, written down a
second time.

Deliberately plain and free of imports from the package under test: what it says is what the
published checkpoints contain.
"""

from pathlib import Path

import torch
from torch import nn

CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2023, 0.1994, 0.2010)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class InputLayer(nn.Module):
    """NormalizeLayer or InputCenterLayer: the constants are plain attributes, so no file holds
    them.
    """

    def __init__(self, kind: str, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.kind, self.constants = kind, (mean, std)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean, std = (torch.tensor(values).reshape(1, -1, 1, 1) for values in self.constants)
        return {"normalize": (images - mean) / std, "center": images - mean}[self.kind]


class Block(nn.Module):
    """conv-BN-ReLU-conv-BN, plus the shortcut, then ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride == 2:
            shortcut = nn.Conv2d(inputs, outputs, kernel_size=1, stride=2, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn1(self.conv1(x)).relu()
        out = self.bn2(self.conv2(out))
        return (out + (x if self.downsample is None else self.downsample(x))).relu()


class CifarResNet(nn.Module):
    """ResNet-(6k + 2) for 32x32 images: 3 stages of k blocks, widths 16, 32 and 64, maps 32, 16 and
    8.
    """

    def __init__(self, depth: int, num_classes: int) -> None:
        super().__init__()
        k = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(*[Block(16, 16, 1) for _ in range(k)])
        self.layer2 = nn.Sequential(Block(16, 32, 2), *[Block(32, 32, 1) for _ in range(k - 1)])
        self.layer3 = nn.Sequential(Block(32, 64, 2), *[Block(64, 64, 1) for _ in range(k - 1)])
        self.avgpool = nn.AvgPool2d(8)
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(self.avgpool(x).flatten(1))


def cifar_classifier(
    depth: int, num_classes: int, input_layer: str, seed: int = 0
) -> nn.Sequential:
    """The released Sequential(input layer, network), in eval mode, with weights that look
    trained.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(
        InputLayer(input_layer, CIFAR_MEAN, CIFAR_STD), CifarResNet(depth, num_classes)
    )
    randomise_batch_norms(model)
    return model.eval()


def randomise_batch_norms(model: nn.Module) -> None:
    """Give every batch normalization statistics of its own: fresh ones, 0 and 1, would hide a
    mix-up.
    """
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.6, 1.5)
            nn.init.normal_(layer.bias, 0.0, 0.1)
            nn.init.normal_(layer.running_mean, 0.0, 0.1)
            nn.init.uniform_(layer.running_var, 0.5, 1.0)
            layer.num_batches_tracked.fill_(29_400)


def blocky_images(number: int, side: int = 32) -> torch.Tensor:
    """Images in [0, 1] of 4x4 coloured blocks: unlike noise, which averages out, they get logits of
    their own.
    """
    blocks = torch.rand(number, 3, 4, 4, generator=torch.Generator().manual_seed(number))
    return blocks.repeat_interleave(side // 4, 2).repeat_interleave(side // 4, 3)


def save_released_checkpoint(
    path: Path, model: nn.Module, arch: str, zipped: bool = True, momentum: bool = True
) -> Path:
    """Write ``{epoch, arch, state_dict, optimizer}``, by default with the momentum buffers of a
    finished run.

    ``zipped=False`` writes the file format of the PyTorch versions that made the published files.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    if momentum:
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    content = {
        "epoch": 150,
        "arch": arch,
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path
