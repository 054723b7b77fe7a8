"""VGG-16, configuration D of Simonyan and Zisserman.

"Very deep convolutional networks for large-scale image recognition", 2014, arXiv 1409.1556: 138,357,544
parameters for 1,000 classes; 138,365,992 with batch normalisation. Parameters have torchvision's names.
"""

import torch
from torch import nn

from models import IMAGENET_MEAN, IMAGENET_SCALE

STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class Model(nn.Module):
    """VGG-16 for 224 x 224 images.

    Args:
        batch_norm: Adds batch normalisation after every convolution; it trains faster and is less sensitive.
    """

    input_size = 224
    input_mean = IMAGENET_MEAN
    input_scale = IMAGENET_SCALE

    def __init__(self, n_classes: int, batch_norm: bool = False, dropout: float = 0.5) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        n_in = 3
        for stage in STAGES:
            for n_out in stage:
                layers.append(nn.Conv2d(n_in, n_out, 3, padding=1))
                layers += [nn.BatchNorm2d(n_out)] if batch_norm else []
                layers.append(nn.ReLU(inplace=True))
                n_in = n_out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, n_classes),
        )
        self._initialise()

    def _initialise(self) -> None:
        """Initialise after Glorot and Bengio 2010, as section 3.1 advises in a footnote; biases are zero."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return logits
