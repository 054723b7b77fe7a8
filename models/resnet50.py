"""ResNet-50, version 1.5: the stride is in the 3 x 3 convolution, not in the 1 x 1 before it.

He, Zhang, Ren, Sun 2015, "Deep residual learning for image recognition", arXiv 1512.03385, table 1;
25,557,032 parameters for 1,000 classes. Parameters have torchvision's names.
"""

import torch
from torch import nn

from models import IMAGENET_MEAN, IMAGENET_SCALE

EXPANSION = 4


def conv(n_in: int, n_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias that keeps the image's size at stride 1."""
    return nn.Conv2d(n_in, n_out, size, stride, size // 2, bias=False)


class Bottleneck(nn.Module):
    """1 x 1 - 3 x 3 - 1 x 1 around a shortcut, which is a 1 x 1 convolution where sizes change."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = width * EXPANSION
        self.conv1, self.bn1 = conv(n_in, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, n_out, 1), nn.BatchNorm2d(n_out)
        self.downsample = None
        if n_in != n_out:
            self.downsample = nn.Sequential(conv(n_in, n_out, 1, stride), nn.BatchNorm2d(n_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + (self.downsample(x) if self.downsample else x))


class Model(nn.Module):
    """ResNet-50 for 224 x 224 images.

    Args:
        zero_init_residual: Starts the last gain of each block at zero, so that blocks start as their
            shortcuts. Goyal et al. 2017 (arXiv 1706.02677, section 5.1) found that it helps with large
            batches.
    """

    input_size = 224
    input_mean = IMAGENET_MEAN
    input_scale = IMAGENET_SCALE

    def __init__(self, n_classes: int, zero_init_residual: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(3, 64, 7, 2), nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._stage(64, 64, 3, 1)
        self.layer2 = self._stage(256, 128, 4, 2)
        self.layer3 = self._stage(512, 256, 6, 2)
        self.layer4 = self._stage(1024, 512, 3, 2)
        self.fc = nn.Linear(2048, n_classes)
        self._initialise(zero_init_residual)

    @staticmethod
    def _stage(n_in: int, width: int, n_blocks: int, stride: int) -> nn.Sequential:
        first = Bottleneck(n_in, width, stride)
        return nn.Sequential(first, *(Bottleneck(4 * width, width, 1) for _ in range(n_blocks - 1)))

    def _initialise(self, zero_init_residual: bool) -> None:
        """Initialise after He et al. 2015, "Delving deep into rectifiers", by outputs; fc N(0, 0.01)."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.bn1(self.conv1(images))))  # 64 x 56 x 56
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # 2048 x 7 x 7
        logits: torch.Tensor = self.fc(x.mean((2, 3)))
        return logits
