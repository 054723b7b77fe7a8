"""The network of tests/golden/run_0_1: one convolution and one linear layer."""

import torch
from torch import nn


class Model(nn.Module):
    """Convolution with 4 channels, ReLU, average pooling, linear layer; 8 x 8 inputs."""

    input_size = 8

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.linear = nn.Linear(4, n_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.convolution(images / 64)).mean(dim=(2, 3))
        logits: torch.Tensor = self.linear(features)
        return logits
