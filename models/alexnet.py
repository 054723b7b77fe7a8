"""AlexNet, in the three variants in which its results are published.

Krizhevsky, Sutskever, Hinton 2012, "ImageNet classification with deep convolutional neural networks", section
3.5: 96 - 256 (2 groups) - 384 - 384 (2 groups) - 256 (2 groups) - 4096 - 4096 - n_classes; 60,965,224
parameters for 1,000 classes.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lockstep.network.layers import LocalResponseNorm, ReluMaxPool


@dataclass(frozen=True)
class Variant:
    """The details in which the variants differ.

    Attributes:
        order: Order of normalisation and pooling after conv1 and conv2: 'norm-pool' or 'pool-norm'.
        k: Constant of the normalisation.
        alpha_over_n: Whether alpha is divided by n, as in Caffe.
        fc_std: Standard deviation of the initial weights of fc6 and fc7.
        biases: Names and initial values of the biases that do not start at zero.
        n: Channels that the normalisation sums.
        alpha: Factor of the normalisation's sum.
        beta: Exponent of the normalisation.
        groups: Groups of conv2, conv4 and conv5.
    """

    order: str
    k: float
    alpha_over_n: bool
    fc_std: float
    biases: tuple[tuple[str, float], ...]
    n: int = 5
    alpha: float = 1e-4
    beta: float = 0.75
    groups: int = 2

    def __post_init__(self) -> None:
        if self.order not in ("norm-pool", "pool-norm"):
            raise ValueError(f"order is norm-pool or pool-norm, not {self.order!r}")
        if self.groups not in (1, 2):
            raise ValueError(f"groups is 1 or 2, not {self.groups!r}")


def _biases(value: float, *layers: str) -> tuple[tuple[str, float], ...]:
    return tuple((f"{layer}.bias", value) for layer in layers)


# caffe: its reference net, "CaffeNet". theano_alexnet: Ding et al. 2014, arXiv 1412.2302.
VARIANTS = {
    "published": Variant(
        "norm-pool", 2.0, False, 0.01, _biases(1.0, "conv2", "conv4", "conv5", "fc6", "fc7")
    ),
    "caffe": Variant("pool-norm", 1.0, True, 0.005, _biases(1.0, "conv2", "conv4", "conv5", "fc6", "fc7")),
    "theano_alexnet": Variant("pool-norm", 2.0, False, 0.005, _biases(0.1, "conv2", "conv4", "fc6", "fc7")),
}


class Model(nn.Module):
    """AlexNet for 227 x 227 images (the paper says 224; its sizes need 227).

    Args:
        variant: 'published', 'caffe' or 'theano_alexnet'.
        dropout: Probability of dropping a feature of fc6 and fc7.
        options: Fields of `Variant` that replace the variant's.

    Raises:
        ValueError: The variant or an option's value is unknown.
        TypeError: An option is unknown.
    """

    input_size = 227

    def __init__(
        self, n_classes: int, variant: str = "published", dropout: float = 0.5, **options: Any
    ) -> None:
        super().__init__()
        if variant not in VARIANTS:
            raise ValueError(f"variant is one of {', '.join(VARIANTS)}, not {variant!r}")
        self.variant = form = replace(VARIANTS[variant], **options)
        self.conv1 = nn.Conv2d(3, 96, 11, stride=4)
        self.conv2 = nn.Conv2d(96, 256, 5, padding=2, groups=form.groups)
        self.conv3 = nn.Conv2d(256, 384, 3, padding=1)
        self.conv4 = nn.Conv2d(384, 384, 3, padding=1, groups=form.groups)
        self.conv5 = nn.Conv2d(384, 256, 3, padding=1, groups=form.groups)
        self.fc6 = nn.Linear(256 * 6 * 6, 4096)
        self.fc7 = nn.Linear(4096, 4096)
        self.fc8 = nn.Linear(4096, n_classes)
        self.pool, self.relu_pool = nn.MaxPool2d(3, stride=2), ReluMaxPool(3, stride=2)
        alpha = form.alpha / form.n if form.alpha_over_n else form.alpha
        self.norm = LocalResponseNorm(form.n, form.k, alpha, form.beta)
        self.dropout6 = nn.Dropout(dropout)
        self.dropout7 = nn.Dropout(dropout)
        self._initialise()

    def _initialise(self) -> None:
        """Initialise as in section 5: weights N(0, 0.01); some biases above zero against dead rectifiers."""
        biases = dict(self.variant.biases)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.constant_(parameter, biases.get(name, 0.0))
            else:
                std = self.variant.fc_std if name in ("fc6.weight", "fc7.weight") else 0.01
                nn.init.normal_(parameter, std=std)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self._norm_and_pool(self.conv1, images)  # 96 x 27 x 27
        x = self._norm_and_pool(self.conv2, x)  # 256 x 13 x 13
        x = torch.relu(self.conv3(x))
        x = torch.relu(self.conv4(x))
        x = self.relu_pool.behind(self.conv5, x)  # 256 x 6 x 6
        x = self.dropout6(torch.relu(self.fc6(x.flatten(1))))
        x = self.dropout7(torch.relu(self.fc7(x)))
        logits: torch.Tensor = self.fc8(x)
        return logits

    def _norm_and_pool(self, convolution: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the convolution, rectified, normalised and pooled in the variant's order."""
        result: torch.Tensor
        if self.variant.order == "norm-pool":
            result = self.pool(self.norm(torch.relu(convolution(x))))
        else:
            result = self.norm(self.relu_pool.behind(convolution, x))
        return result
