"""Makes the network that a models/<name>.py file exports."""

import importlib

import torch
from torch import nn

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.randomness import Purpose, seed_of


def build_model(config: Config, n_classes: int) -> nn.Module:
    """The Model of models/<model>.py, with the same initial weights in every trainer, channels last.

    Raises UserError where the file can't be imported or does not keep the contract of models/__init__.py.
    """
    file = f"models/{config.model}.py"
    torch.manual_seed(seed_of(Purpose.INITIALISATION, config.seed))
    try:
        model = importlib.import_module(f"models.{config.model}").Model(n_classes, **config.model_args)
    except Exception as error:  # it is the user's code
        raise UserError(
            f"{file}: Model(n_classes={n_classes}, **{config.model_args}) can't be made: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module) or not isinstance(getattr(model, "input_size", None), int):
        raise UserError(f"{file}: Model must be a torch.nn.Module with a whole number `input_size`")
    # As the images lie: faster on tensor cores.
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def crop_size(model: nn.Module, config: Config, image_shape: tuple[int, ...]) -> int:
    """Rows and columns that the network takes. Raises UserError where the dataset's pictures are smaller."""
    size = model.input_size
    assert isinstance(size, int)
    if size > min(image_shape[:2]):
        raise UserError(
            f"model {config.model} takes {size} x {size} pictures, those in {config.data_folder} "
            f"are only {image_shape[0]} x {image_shape[1]}: make the dataset with --size {size} or more"
        )
    return size
