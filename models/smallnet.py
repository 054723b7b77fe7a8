"""A small net for 32 x 32 images: 3 convolutions, 2 fully connected layers, about 358,000 parameters."""

import torch
from torch import nn

from lockstep.network.layers import ReluMaxPool


class Model(nn.Module):
    """conv 32 - pool - conv 64 - pool - conv 128 - pool - fc 128 - dropout - fc, with 3 x 3 convolutions."""

    input_size = 32

    def __init__(self, n_classes: int, dropout: float = 0.5, n_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 128, 3, padding=1)
        self.fc4 = nn.Linear(128 * 4 * 4, 128)
        self.dropout = nn.Dropout(dropout)
        self.fc5 = nn.Linear(128, n_classes)
        self.pool = ReluMaxPool(2, 2)
        self._initialise()

    def _initialise(self) -> None:
        """Initialise after He et al. 2015, "Delving deep into rectifiers", eq. 10; biases are zero."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images / 64  # about the spread of pixel values around their mean
        for conv in (self.conv1, self.conv2, self.conv3):
            x = self.pool.behind(conv, x)
        x = torch.relu(self.fc4(x.flatten(1)))
        logits: torch.Tensor = self.fc5(self.dropout(x))
        return logits
