"""GoogLeNet with its two auxiliary heads.

Szegedy et al. 2014, "Going deeper with convolutions", arXiv 1409.4842, table 1 and section 5: 6,998,552
parameters for 1,000 classes, 13,378,280 with the auxiliary heads. Section 6 does not specify the initial
weights; these are those of Caffe's re-implementation, and so is the normalisation.
"""

import math

import torch
from torch import nn

from lockstep.network.layers import LocalResponseNorm


def conv(n_in: int, n_out: int, size: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the image's size at stride 1, and a rectifier."""
    return nn.Sequential(nn.Conv2d(n_in, n_out, size, stride, size // 2), nn.ReLU(inplace=True))


class Inception(nn.Module):
    """Four parallel branches: 1 x 1; 3 x 3 and 5 x 5, each after a reducing 1 x 1; and pooling."""

    def __init__(
        self, n_in: int, ones: int, threes: tuple[int, int], fives: tuple[int, int], pooled: int
    ) -> None:
        super().__init__()
        self.branch1 = conv(n_in, ones, 1)
        self.branch2 = nn.Sequential(conv(n_in, threes[0], 1), conv(*threes, 3))
        self.branch3 = nn.Sequential(conv(n_in, fives[0], 1), conv(*fives, 5))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(n_in, pooled, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branches = (self.branch1, self.branch2, self.branch3, self.branch4)
        return torch.cat([branch(x) for branch in branches], 1)


class Head(nn.Sequential):
    """An auxiliary classifier on 14 x 14 features, for training only (section 5)."""

    def __init__(self, n_in: int, n_classes: int, dropout: float) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(5, 3)
        self.conv = conv(n_in, 128, 1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(128 * 4 * 4, 1024)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(1024, n_classes)


class Model(nn.Module):
    """GoogLeNet for 224 x 224 images. In training it returns (logits, logits of head 1, logits of head 2)."""

    input_size = 224
    aux_weights = (0.3, 0.3)

    def __init__(self, n_classes: int, dropout: float = 0.4, aux_dropout: float = 0.7) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.norm = LocalResponseNorm(n=5, k=1.0, alpha=1e-4 / 5, beta=0.75)
        self.conv1 = conv(3, 64, 7, 2)
        self.conv2 = conv(64, 64, 1)
        self.conv3 = conv(64, 192, 3)
        self.inception3a = Inception(192, 64, (96, 128), (16, 32), 32)
        self.inception3b = Inception(256, 128, (128, 192), (32, 96), 64)
        self.inception4a = Inception(480, 192, (96, 208), (16, 48), 64)
        self.inception4b = Inception(512, 160, (112, 224), (24, 64), 64)
        self.inception4c = Inception(512, 128, (128, 256), (24, 64), 64)
        self.inception4d = Inception(512, 112, (144, 288), (32, 64), 64)
        self.inception4e = Inception(528, 256, (160, 320), (32, 128), 128)
        self.inception5a = Inception(832, 256, (160, 320), (32, 128), 128)
        self.inception5b = Inception(832, 384, (192, 384), (48, 128), 128)
        self.aux1 = Head(512, n_classes, aux_dropout)
        self.aux2 = Head(528, n_classes, aux_dropout)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(1024, n_classes)
        self._initialise()

    def _initialise(self) -> None:
        """Initialise weights uniformly with variance 1 / inputs; biases 0.2, classifiers' biases zero."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                classifies = name == "fc.bias" or name.endswith("classifier.bias")
                nn.init.constant_(parameter, 0.0 if classifies else 0.2)
            else:
                bound = math.sqrt(3 / parameter[0].numel())
                nn.init.uniform_(parameter, -bound, bound)

    def forward(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        x = self.norm(self.pool(self.conv1(images)))  # 64 x 56 x 56
        x = self.pool(self.norm(self.conv3(self.conv2(x))))  # 192 x 28 x 28
        x = self.pool(self.inception3b(self.inception3a(x)))  # 480 x 14 x 14
        x = middle = self.inception4a(x)
        x = late = self.inception4d(self.inception4c(self.inception4b(x)))
        x = self.pool(self.inception4e(x))  # 832 x 7 x 7
        x = self.inception5b(self.inception5a(x)).mean((2, 3))
        logits: torch.Tensor = self.fc(self.dropout(x))
        return (logits, self.aux1(middle), self.aux2(late)) if self.training else logits
