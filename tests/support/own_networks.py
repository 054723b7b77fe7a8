"""A user's module with a network, which tests of lockstep.synk import."""

import torch


class Doubling(torch.nn.Module):
    """A network with an attribute whose name is that of a global, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.net(x)


nets = {"only": Doubling()}
net = nets["only"]


def compute(x: torch.Tensor) -> torch.Tensor:
    """Compute with the network of this module."""
    return nets["only"](x)
