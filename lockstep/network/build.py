"""Construction of the network that `model` names, and the form in which it takes images.

A network whose weights are loaded afterwards is made without drawing random ones first: AlexNet's initial
weights take as long as one of its steps. A constructor may use them or draw more numbers for itself, so they
are left out only where nothing but the parameters' values depends on them.
"""

import importlib
import inspect
import itertools
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from lockstep.config import Config
from lockstep.data.randomness import Purpose, seed_of
from lockstep.errors import UserError, nearest
from lockstep.objects import SOURCE, load_object

_USUAL_SIZE = 224  # rows and columns for networks of timm that don't say
_DRAWS = frozenset(
    {
        torch.Tensor.uniform_,
        torch.Tensor.normal_,
        nn.init.uniform_,
        nn.init.normal_,
        nn.init.kaiming_uniform_,
    }
)
_FACTS = (int, torch.Size, type(None))  # results that do not depend on a parameter's values


@dataclass(frozen=True)
class InputSpec:
    """The images that a network takes: (pixel - mean) * scale for pixels from 0 to 255.

    Attributes:
        size: Rows and columns.
        mean: For each channel; None is the dataset's mean image.
        scale: For each channel.
    """

    size: tuple[int, int]
    mean: tuple[float, ...] | None = None
    scale: tuple[float, ...] = (1.0, 1.0, 1.0)


def build_model(config: Config, n_classes: int, loaded: Collection[str] = ()) -> nn.Module:
    """Return the network, channels last, with the same initial weights in every trainer.

    Args:
        config: The run's configuration.
        n_classes: Outputs of the network.
        loaded: Names of all weights and buffers, if the caller loads a checkpoint of this network next. Its
            initial weights may then be anything.

    Raises:
        UserError: The network cannot be constructed, or breaks the contract of models/__init__.py.
    """
    torch.manual_seed(seed_of(Purpose.INITIALISATION, config.seed))
    source, _, name = config.model.rpartition(":")
    libraries = {"torchvision": _from_torchvision, "timm": _from_timm}
    sources = {"": _from_models, SOURCE: _from_caller, **libraries}
    make = partial(sources.get(source, partial(_from_module, source)), name, n_classes, config)
    try_out = partial(_try_out, config=config, n_classes=n_classes)
    if loaded and (found := make_without_draws(make, try_out, loaded)) is not None:
        _lay_out(found, config)
        return found
    try:
        model = make()
    except UserError:
        raise
    except Exception as error:  # the user's code, or arguments that a library rejects
        raise UserError(
            f"model {config.model}: can't be made for {n_classes} classes with model_args "
            f"{config.model_args}: {type(error).__name__}: {error}{_advice(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model {config.model}: must make a torch.nn.Module, not {type(model).__name__}")
    _check_dense(model, config)
    _lay_out(model, config)  # as it trains, so that the trial shows what fails at that
    _try_out(model, config, n_classes)
    _lay_out(model, config)  # what the trial has made: the weights of lazy modules
    return model


def _lay_out(model: nn.Module, config: Config) -> None:
    """Make the network channels last, as the images are: it is faster on tensor cores.

    `nn.Module.to` does so too, but fails at tensors of five dimensions.

    Raises:
        UserError: A trained parameter shares memory with another tensor.
    """
    _check_apart(model, config)
    model._apply(_channels_last)  # type: ignore[no-untyped-call]


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor channels last if it has four dimensions."""
    if is_lazy(tensor) or tensor.dim() != 4:
        return tensor
    return tensor.to(memory_format=torch.channels_last)


def _advice(error: Exception) -> str:
    """Return what to do about an error of a library, or no text."""
    if "torchvision::" in str(error):  # its compiled operators could not be loaded
        return (
            ". torchvision has another build than torch: install both with the same --index-url "
            '(docs/install.md, "More packages").'
        )
    return ""


def input_spec_of(model: nn.Module, config: Config) -> InputSpec:
    """Return the images' form: the configuration's, else the network's own.

    Raises:
        UserError: Neither gives a size.
    """
    source, _, name = config.model.rpartition(":")
    if source == "torchvision":
        default = _torchvision_spec(name)
    elif source == "timm":
        default = _timm_spec(model)
    else:
        default = _declared_spec(model, config)
    n_channels = config.n_channels or 3
    scale = default.scale if config.scale is None else config.scale
    scale = scale if isinstance(scale, tuple) else (scale,) * n_channels
    mean = default.mean if config.subtract_mean is None else None
    for key, values in (("subtract_mean", mean), ("scale", scale)):
        if values is not None and len(values) != n_channels:
            raise UserError(
                f"model {config.model}: is for images with {len(values)} channels, these have {n_channels}. "
                f"Set {key} to {n_channels} number(s), or n_channels: {len(values)}."
            )
    return InputSpec(sides_of(config.input_size or default.size), mean, scale)


def sides_of(size: int | tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a size, which is square if it is one number."""
    rows, columns = (size, size) if isinstance(size, int) else size
    return rows, columns


def crop_size(model: nn.Module, config: Config, image_shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of the images that the network takes.

    Raises:
        UserError: The dataset's images are smaller.
    """
    rows, columns = input_spec_of(model, config).size
    if rows > image_shape[0] or columns > image_shape[1]:
        where = f"in {config.data_folder}" if config.data is None else "of `data`"
        larger = f"Make the dataset with --size {max(rows, columns)} or more"
        larger = larger if config.data is None else f"Set item_size=[{rows}, {columns}] or more"
        raise UserError(
            f"model {config.model} takes {rows} x {columns} images, those {where} "
            f"are only {image_shape[0]} x {image_shape[1]}. {larger}, or "
            f"set input_size={min(image_shape[:2])} if the network takes that."
        )
    return rows, columns


def arguments_of(make: Any, config: Config) -> dict[str, Any]:
    """Return `model_args`, with the images' channels if `make` has a parameter `n_channels`."""
    args = dict(config.model_args)
    if config.n_channels not in (None, 3) and "n_channels" in inspect.signature(make).parameters:
        args.setdefault("n_channels", config.n_channels)
    return args


def _called(make: Any, n_classes: int, config: Config) -> Any:
    return make(n_classes, **arguments_of(make, config))


def _from_models(name: str, n_classes: int, config: Config) -> Any:
    module = importlib.import_module(f"models.{name}")
    if not hasattr(module, "Model"):
        raise UserError(f"model: {module.__file__} has no Model. Give its class or function that name.")
    return _called(module.Model, n_classes, config)


def _from_module(source: str, name: str, n_classes: int, config: Config) -> Any:
    module = importlib.import_module(source)
    if not hasattr(module, name):
        raise UserError(f"model: {source} has no {name}{nearest(name, dir(module))}")
    return _called(getattr(module, name), n_classes, config)


def _from_caller(name: str, n_classes: int, config: Config) -> Any:
    return _called(load_object("model", name), n_classes, config)


def _from_torchvision(name: str, n_classes: int, config: Config) -> Any:
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise UserError(f"model: torchvision has no {name}{nearest(name, known)}")
    return models.get_model(name, num_classes=n_classes, **config.model_args)


def _from_timm(name: str, n_classes: int, config: Config) -> Any:
    import timm

    if not timm.is_model(name):
        raise UserError(f"model: timm has no {name}{nearest(name, timm.list_models())}")
    channels = {} if config.n_channels in (None, 3) else {"in_chans": config.n_channels}
    return timm.create_model(name, num_classes=n_classes, **channels | config.model_args)


def _torchvision_spec(name: str) -> InputSpec:
    """Return the form of the images that the pretrained weights were trained on."""
    from torchvision import models

    transforms = models.get_model_weights(name).DEFAULT.transforms()
    return _normalised(transforms.crop_size[0], transforms.mean, transforms.std)


def _timm_spec(model: nn.Module) -> InputSpec:
    config: Any = getattr(model, "pretrained_cfg", {})
    size = config.get("input_size", (3, _USUAL_SIZE, _USUAL_SIZE))[-1]
    return _normalised(size, config.get("mean", (0.5,) * 3), config.get("std", (0.5,) * 3))


def _normalised(size: int, mean: Any, std: Any) -> InputSpec:
    """Return the spec for a mean and a standard deviation of pixels from 0 to 1."""
    return InputSpec(
        sides_of(size), tuple(255 * value for value in mean), tuple(1 / (255 * value) for value in std)
    )


def _declared_spec(model: nn.Module, config: Config) -> InputSpec:
    size: Any = getattr(model, "input_size", None)
    is_size = type(size) is int or (isinstance(size, tuple | list) and [*map(type, size)] == [int, int])
    if not is_size and config.input_size is None:
        raise UserError(
            f"model {config.model}: has no whole number `input_size`, or two for rows and columns. "
            "Give the class one, or set input_size."
        )
    mean = getattr(model, "input_mean", None)
    scale = getattr(model, "input_scale", 1.0)
    n_channels = config.n_channels or 3
    scale = (scale,) * n_channels if isinstance(scale, int | float) else scale
    lengths = {3} if n_channels == 3 else {1, 2, 3, 4}  # `input_spec_of` compares them with the channels
    for key, values in (("input_mean", mean or (0.0,) * n_channels), ("input_scale", scale)):
        if len(values) not in lengths or not all(isinstance(value, int | float) for value in values):
            raise UserError(f"model {config.model}: its {key} must be 3 numbers, for R, G and B: {values}")
    sides = sides_of(size) if is_size else (0, 0)
    return InputSpec(sides, tuple(mean) if mean else None, tuple(scale))


def _try_out(model: nn.Module, config: Config, n_classes: int) -> None:
    """Raise a UserError unless the network returns logits for two images."""
    rows, columns = input_spec_of(model, config).size
    n_channels, training = config.n_channels or 3, model.training
    model.eval()
    try:
        with torch.no_grad():
            images = _channels_last(torch.zeros(2, n_channels, rows, columns))
            logits = model(images)
            if getattr(model, "aux_weights", ()):
                _try_out_training(model, images)
    except Exception as error:  # the user's code
        remedy = "If it needs another size, set input_size" + (", or null." if config.input_size else ".")
        if n_channels != 3:
            remedy = f"Images have {n_channels} channel(s): give model_args for that, or set n_channels: 3."
        if "stride" in str(error):
            remedy = "Images, weights and activations are channels last: use reshape() for view(), and "
            remedy += "contiguous() where the code needs channels first."
        raise UserError(
            f"model {config.model}: can't take {rows} x {columns} images: {type(error).__name__}: {error}. "
            f"{remedy}"
        ) from error
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, n_classes):
        actual = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise UserError(f"model {config.model}: must make logits (2, {n_classes}) of 2 images, not {actual}")
    model.train(training)


def _try_out_training(model: nn.Module, images: torch.Tensor) -> None:
    """Run the auxiliary heads, which compute in training only. Keep buffers and random numbers."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=()):
        torch.func.functional_call(model.train(), buffers, (images,))


def _check_dense(model: nn.Module, config: Config) -> None:
    """Raise a UserError if a layer has sparse gradients, which trainers can't add up."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise UserError(f"model {config.model}: {name} has sparse gradients. Make it with sparse=False.")


def _check_apart(model: nn.Module, config: Config) -> None:
    """Raise a UserError if a trained parameter has elements in common with another tensor of the model.

    Each tensor gets memory of its own, so the two would no longer change together.
    """
    places: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is torch.strided and not is_lazy(tensor) and tensor.numel() and tensor.data_ptr():
            places.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for sharing in places.values():
        for (name, one), (other, two) in itertools.combinations(sharing, 2):
            if (one.requires_grad or two.requires_grad) and _overlap(one, two):
                raise UserError(
                    f"model {config.model}: {other} has the memory of {name}, which it would lose. Use one "
                    "parameter in both places, or compute one of them from the other in forward."
                )


def _overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have elements in common."""
    first, last = sorted((one, two), key=torch.Tensor.data_ptr)
    n_between = sum((n - 1) * stride for n, stride in zip(first.shape, first.stride(), strict=True))
    if first.data_ptr() + (n_between + 1) * first.itemsize <= last.data_ptr():
        return False
    places = torch.arange(one.untyped_storage().nbytes() // one.itemsize)
    numbers = (places.as_strided(each.size(), each.stride(), each.storage_offset()) for each in (one, two))
    return one.itemsize == two.itemsize and bool(torch.isin(*numbers).any())


class _SkippedDraws(TorchFunctionMode):
    """A context in which parameters keep what their memory had, instead of random numbers.

    Attributes:
        is_read: Whether a value that was left out has been used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_read = False
        self._skipped: dict[int, nn.Parameter] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target, *others = (*args, *kwargs.values()) or (None,)
        if func in _DRAWS and isinstance(target, nn.Parameter):
            self._skipped[id(target)] = target
            return target
        result = func(*args, **kwargs)
        reads = any(map(self._has, others)) or (type(target) in (list, tuple) and self._has(target))
        is_fact = type(result) in _FACTS or (_is_property(func) and not isinstance(result, torch.Tensor))
        if reads or (self._has(target) and result is not target and not is_fact):
            self.is_read = True
        return result

    def _has(self, value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(map(self._has, value))
        return id(value) in self._skipped


def _is_property(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__"


def make_without_draws(
    make: Callable[[], Any], try_out: Callable[[Any], None], loaded: Collection[str]
) -> nn.Module | None:
    """Return the network that `make` makes, but for the values of its parameters; None if that can't be told.

    In that case `make` may have been called, and torch's generator is as before. It can't be told if numbers
    are drawn for anything else, if a skipped value is read, or if the first pass changes attributes, such as
    a constant that is computed then.

    Args:
        make: Makes the network.
        try_out: Runs a first pass of the network.
        loaded: Names of all weights and buffers that the caller loads, such as 'weights/fc.bias'.
    """
    before, draws = torch.get_rng_state(), _SkippedDraws()
    model, is_safe = None, False
    with suppress(Exception):  # an error comes again where the network is made in full
        with draws:
            model = make()
        attributes = _attributes(model)
        try_out(model)
        is_safe = (
            not draws.is_read and _names(model) == {*loaded} and _are_same(attributes, _attributes(model))
        )
    is_safe &= torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)
    return model if is_safe else None


def _names(model: nn.Module) -> set[str]:
    named = ("weights", model.named_parameters()), ("buffers", model.named_buffers())
    return {f"{kind}/{name}" for kind, values in named for name, _ in values}


def _attributes(model: nn.Module) -> list[tuple[Any, int]]:
    """Return the attributes that may hold a state, with the sizes of containers.

    Parameters, buffers and modules are no such attributes. Lockstep's own layers compute constants only.
    """
    values = [
        value
        for module in model.modules()
        if not type(module).__module__.startswith("lockstep.")
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules")
    ]
    return [(value, len(value) if isinstance(value, list | dict | set) else 0) for value in values]


def _are_same(before: list[tuple[Any, int]], after: list[tuple[Any, int]]) -> bool:
    return len(before) == len(after) and all(
        old is new and size == new_size for (old, size), (new, new_size) in zip(before, after, strict=True)
    )
