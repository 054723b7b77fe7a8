"""A residual net for 32 x 32 images: He et al. 2015, arXiv 1512.03385, section 4.2, with 6 n + 2 layers.

n = 3 is ResNet-20, with 269,722 parameters for 10 classes. Shortcuts have no parameters (option A): where the
image halves and the features double, they skip every other pixel and pad the features with zeros.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Two 3 x 3 convolutions around a shortcut."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.stride = 1 if n_in == n_out else 2
        self.conv1 = nn.Conv2d(n_in, n_out, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        more = y.shape[1] - x.shape[1]
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, more // 2, more // 2))
        return torch.relu(y + shortcut)


class Model(nn.Module):
    """A convolution of 16 features, n blocks each of 16, 32 and 64 features, mean over the image, fc."""

    input_size = 32
    input_scale = 1 / 64  # about the spread of pixel values around their mean

    def __init__(self, n_classes: int, n: int = 3, n_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_channels, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        sizes = [16, *(size for size in (16, 32, 64) for _ in range(n))]
        self.blocks = nn.Sequential(*(Block(*pair) for pair in itertools.pairwise(sizes)))
        self.fc = nn.Linear(64, n_classes)
        self._initialise()

    def _initialise(self) -> None:
        """Initialise after He et al. 2015, "Delving deep into rectifiers", eq. 10; fc.bias is zero."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(images)))
        logits: torch.Tensor = self.fc(self.blocks(x).mean((2, 3)))
        return logits
