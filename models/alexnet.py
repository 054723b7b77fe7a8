"""AlexNet as published, with pooling before normalisation as in Caffe's reference net and theano_alexnet.

Krizhevsky, Sutskever, Hinton 2012, "ImageNet classification with deep convolutional neural networks", section
3.5: 96 - 256 (2 groups) - 384 - 384 (2 groups) - 256 (2 groups) - 4096 - 4096 - n_classes; 60,965,224
parameters for 1,000.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """AlexNet for 227 x 227 pictures (the paper says 224; its sizes need 227)."""

    input_size = 227

    def __init__(self, n_classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 96, 11, stride=4)
        self.conv2 = nn.Conv2d(96, 256, 5, padding=2, groups=2)
        self.conv3 = nn.Conv2d(256, 384, 3, padding=1)
        self.conv4 = nn.Conv2d(384, 384, 3, padding=1, groups=2)
        self.conv5 = nn.Conv2d(384, 256, 3, padding=1, groups=2)
        self.fc6 = nn.Linear(256 * 6 * 6, 4096)
        self.fc7 = nn.Linear(4096, 4096)
        self.fc8 = nn.Linear(4096, n_classes)
        self.pool = nn.MaxPool2d(3, stride=2)
        self.norm = LocalResponseNorm()
        self.dropout6 = nn.Dropout(dropout)
        self.dropout7 = nn.Dropout(dropout)
        self._initialise()

    def _initialise(self) -> None:
        """Section 5: weights N(0, 0.01); biases one where rectifiers would start dead, else zero."""
        ones = {"conv2.bias", "conv4.bias", "conv5.bias", "fc6.bias", "fc7.bias"}
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.constant_(parameter, 1.0 if name in ones else 0.0)
            else:
                nn.init.normal_(parameter, std=0.01)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.pool(torch.relu(self.conv1(images))))  # 96 x 27 x 27
        x = self.norm(self.pool(torch.relu(self.conv2(x))))  # 256 x 13 x 13
        x = torch.relu(self.conv3(x))
        x = torch.relu(self.conv4(x))
        x = self.pool(torch.relu(self.conv5(x)))  # 256 x 6 x 6
        x = self.dropout6(torch.relu(self.fc6(x.flatten(1))))
        x = self.dropout7(torch.relu(self.fc7(x)))
        logits: torch.Tensor = self.fc8(x)
        return logits


class LocalResponseNorm(nn.Module):
    """Section 3.3: b_i = a_i / (k + alpha * sum of a_j^2 over n neighbouring channels j)^beta.

    The sums are a 1 x 1 convolution with a band matrix: one pass that lies channels last and that GPUs have
    matrix units for. Not nn.LocalResponseNorm: that one divides alpha by n, and is several times slower.
    """

    def __init__(self, n: int = 5, k: float = 2.0, alpha: float = 1e-4, beta: float = 0.75) -> None:
        super().__init__()
        self.n, self.k, self.alpha, self.beta = n, k, alpha, beta
        self._bands: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, channel, row, column)."""
        total = F.conv2d(x * x, self._band(x))
        return x * (self.k + self.alpha * total).pow(-self.beta).to(x.dtype)

    def _band(self, x: torch.Tensor) -> torch.Tensor:
        """(channel, channel, 1, 1): one where channels are neighbours; a constant, so no buffer."""
        place = (x.shape[1], x.dtype, x.device)
        if place not in self._bands:
            channels = torch.arange(x.shape[1], device=x.device)
            near = (channels[:, None] - channels).abs() <= self.n // 2
            self._bands[place] = near[:, :, None, None].to(x.dtype)
        return self._bands[place]
