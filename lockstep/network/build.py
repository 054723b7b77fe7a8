"""Makes the network that `model` names, and knows how it takes its pictures."""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.config import Config
from lockstep.data.randomness import Purpose, seed_of
from lockstep.errors import UserError, nearest

_USUAL_SIZE = 224  # of torchvision's and timm's networks that don't say


@dataclass(frozen=True)
class InputSpec:
    """How a network takes pictures: `size` square, 0 to 255, less `mean`, times `scale`, both for R, G, B.

    mean: None is the dataset's mean image.
    """

    size: int
    mean: tuple[float, ...] | None = None
    scale: tuple[float, ...] = (1.0, 1.0, 1.0)


def build_model(config: Config, n_classes: int) -> nn.Module:
    """The network, with the same initial weights in every trainer, channels last.

    Raises UserError where it can't be made or does not keep the contract of models/__init__.py.
    """
    torch.manual_seed(seed_of(Purpose.INITIALISATION, config.seed))
    source, _, name = config.model.rpartition(":")
    make = {"": _own, "torchvision": _torchvisions, "timm": _timms}.get(source, _anybodys)
    try:
        model = make(source, name, n_classes, config.model_args)
    except UserError:
        raise
    except Exception as error:  # it is the user's code, or what the user asked of others' code
        raise UserError(
            f"model {config.model}: can't be made for {n_classes} classes with model_args "
            f"{config.model_args}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model {config.model}: must make a torch.nn.Module, not {type(model).__name__}")
    _try_out(model, config, n_classes)
    # As the images lie: faster on tensor cores.
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def input_spec_of(model: nn.Module, config: Config) -> InputSpec:
    """What the configuration says, else what the network does. Raises UserError where neither has a size."""
    source, _, name = config.model.rpartition(":")
    if source == "torchvision":
        theirs = _torchvisions_intake(name)
    elif source == "timm":
        theirs = _timms_intake(model)
    else:
        theirs = _own_intake(model, config)
    scale = theirs.scale if config.scale is None else config.scale
    return InputSpec(
        config.input_size or theirs.size,
        theirs.mean if config.subtract_mean is None else None,
        scale if isinstance(scale, tuple) else (scale,) * 3,
    )


def crop_size(model: nn.Module, config: Config, image_shape: tuple[int, ...]) -> int:
    """Rows and columns that the network takes. Raises UserError where the dataset's pictures are smaller."""
    size = input_spec_of(model, config).size
    if size > min(image_shape[:2]):
        raise UserError(
            f"model {config.model} takes {size} x {size} pictures, those in {config.data_folder} "
            f"are only {image_shape[0]} x {image_shape[1]}: make the dataset with --size {size} or more"
        )
    return size


def _own(source: str, name: str, n_classes: int, args: dict[str, Any]) -> Any:
    return importlib.import_module(f"models.{name}").Model(n_classes, **args)


def _anybodys(source: str, name: str, n_classes: int, args: dict[str, Any]) -> Any:
    module = importlib.import_module(source)
    if not hasattr(module, name):
        raise UserError(f"model: {source} has no {name}{nearest(name, dir(module))}")
    return getattr(module, name)(n_classes, **args)


def _torchvisions(source: str, name: str, n_classes: int, args: dict[str, Any]) -> Any:
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise UserError(f"model: torchvision has no {name}{nearest(name, known)}")
    return models.get_model(name, num_classes=n_classes, **args)


def _timms(source: str, name: str, n_classes: int, args: dict[str, Any]) -> Any:
    import timm

    if not timm.is_model(name):
        raise UserError(f"model: timm has no {name}{nearest(name, timm.list_models())}")
    return timm.create_model(name, num_classes=n_classes, **args)


def _torchvisions_intake(name: str) -> InputSpec:
    """That of the pretrained weights."""
    from torchvision import models

    pictures = models.get_model_weights(name).DEFAULT.transforms()
    return _normalised(pictures.crop_size[0], pictures.mean, pictures.std)


def _timms_intake(model: nn.Module) -> InputSpec:
    config: Any = getattr(model, "pretrained_cfg", {})
    size = config.get("input_size", (3, _USUAL_SIZE, _USUAL_SIZE))[-1]
    return _normalised(size, config.get("mean", (0.5,) * 3), config.get("std", (0.5,) * 3))


def _normalised(size: int, mean: Any, std: Any) -> InputSpec:
    """mean and std: of pixels from 0 to 1."""
    return InputSpec(size, tuple(255 * value for value in mean), tuple(1 / (255 * value) for value in std))


def _own_intake(model: nn.Module, config: Config) -> InputSpec:
    size = getattr(model, "input_size", None)
    if type(size) is not int and config.input_size is None:
        raise UserError(
            f"model {config.model}: must have a whole number `input_size`, or the configuration must"
        )
    mean = getattr(model, "input_mean", None)
    scale = getattr(model, "input_scale", 1.0)
    scale = (scale,) * 3 if isinstance(scale, int | float) else scale
    for key, values in (("input_mean", mean or (0.0,) * 3), ("input_scale", scale)):
        if len(values) != 3 or not all(isinstance(value, int | float) for value in values):
            raise UserError(f"model {config.model}: its {key} must be 3 numbers, for R, G and B: {values}")
    return InputSpec(size or 0, tuple(mean) if mean else None, tuple(scale))


def _try_out(model: nn.Module, config: Config, n_classes: int) -> None:
    """Raises UserError where the network does not make logits of two pictures."""
    size = input_spec_of(model, config).size
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = model(torch.zeros(2, 3, size, size))
    except Exception as error:  # as above
        raise UserError(
            f"model {config.model}: can't take {size} x {size} pictures: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, n_classes):
        found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise UserError(f"model {config.model}: must make logits (2, {n_classes}) of 2 pictures, not {found}")
    model.train(training)
