"""Augmentation's keys: the arguments of crops and policies, and the checks of all of them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lockstep.errors import UserError
from lockstep.typed import merge_arguments

if TYPE_CHECKING:
    from lockstep.config import Config

CropName = Literal["random", "random_resized", "padded", "center"]
AutoAugmentName = Literal["trivial", "rand"]

CROP_ARGS: dict[CropName, dict[str, Any]] = {
    "random": {},
    "random_resized": {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3)},  # Szegedy et al. 2015, section 6
    "padded": {"padding": 4, "mode": "zero"},  # He et al. 2015, section 4.2
    "center": {},
}
AUTO_AUGMENT_ARGS: dict[AutoAugmentName, dict[str, Any]] = {
    "trivial": {"bins": 31},
    "rand": {"n": 2, "magnitude": 9, "bins": 31},
}
_TYPES = {"mode": Literal["zero", "reflect"]}
_JITTERS = ("brightness", "contrast", "saturation", "hue")
_MOST_HUE = 0.5  # half of the circle of hues
_MOST_PADDING = 1000  # pixels; a wider border leaves little of any image


def crop_of(config: "Config") -> CropName:
    """Return the crop of training images: `crop`, else what theano_alexnet's `rand_crop` says."""
    return config.crop or ("random" if config.rand_crop else "center")


def crop_args_of(config: "Config") -> dict[str, Any]:
    """Return all arguments of the crop, those in `crop_args` before the defaults.

    Raises:
        UserError: An argument is unknown, has another type or is out of range; the message names it.
    """
    name = crop_of(config)
    args = merge_arguments(f"crop: {name}", CROP_ARGS[name], config.crop_args, _TYPES)
    for key in ("scale", "ratio"):
        pair = args.get(key, (1.0, 1.0))
        if len(pair) != 2 or not 0 < pair[0] <= pair[1] < float("inf"):
            raise UserError(f"{key} must be two numbers above 0, the smaller first, not {list(pair)}")
    if args.get("scale", (1.0, 1.0))[1] > 1:
        raise UserError(f"scale must be at most 1, the whole image, not {list(args['scale'])}")
    if args.get("padding", 1) < 1:
        raise UserError(f"padding must be at least 1 pixel, not {args['padding']}")
    if args.get("padding", 1) > _MOST_PADDING:
        raise UserError(f"padding must be at most {_MOST_PADDING} pixels, not {args['padding']}")
    return args


def auto_augment_args_of(config: "Config") -> dict[str, Any]:
    """Return all arguments of `auto_augment`, those in `auto_augment_args` before the defaults.

    Raises:
        UserError: An argument is unknown, has another type or is out of range; the message names it.
    """
    defaults = AUTO_AUGMENT_ARGS[config.auto_augment] if config.auto_augment else {}
    name = f"auto_augment: {config.auto_augment or 'null'}"
    args = merge_arguments(name, defaults, config.auto_augment_args)
    for key, least in (("n", 1), ("magnitude", 0), ("bins", 2)):
        if args.get(key, least) < least:
            raise UserError(f"{key} must be at least {least}, not {args[key]}")
    if args.get("bins", 2) > 255:
        raise UserError(f"bins must be at most 255, not {args['bins']}")
    if args.get("magnitude", 0) >= args.get("bins", 1) > 1:
        raise UserError(f"magnitude must be below bins, {args['bins']}, not {args['magnitude']}")
    return args


def jitter_of(config: "Config") -> tuple[float, float, float, float]:
    """Return the strengths of the jitter of brightness, contrast, saturation and hue."""
    value = config.color_jitter
    strengths = value if isinstance(value, tuple) else (value,) * 3
    return (*strengths, 0.0, 0.0, 0.0, 0.0)[:4]  # type: ignore[return-value]


def mixes(config: "Config") -> bool:
    """Return whether some training images are mixed with others, so that they have two labels."""
    return (config.mixup > 0 or config.cutmix > 0) and config.mix_prob > 0


def uploader_of(config: "Config") -> Literal["loader", "trainer"]:
    """Return the process that copies batches to a GPU.

    `auto` is the trainer: with a loader's CUDA context beside the trainer's, the two take turns on the device
    (docs/results/gpu.md). A loader that augments on the GPU needs one.
    """
    if not config.para_load:
        return "trainer"
    if config.upload != "auto":
        return config.upload
    return "loader" if config.augment_on == "loader" else "trainer"


def makes_images(config: "Config") -> bool:
    """Return whether images are made in the network's size, as bytes, before the mean is subtracted.

    Otherwise the crop and mirror of stored images are part of the conversion to float.
    """
    changes = config.auto_augment, any(jitter_of(config)), config.random_erasing, config.rotate
    return (
        crop_of(config) in ("random_resized", "padded")
        or any((*changes, config.augmentation))
        or mixes(config)
    )


@dataclass(frozen=True)
class DeviceChanges:
    """The changes of images that a GPU's kernels make; the loader's cores make the earlier ones.

    Attributes:
        crops: Whether kernels crop and mirror stored images. Otherwise the loader's cores do all up to the
            user's function.
        resizes: Whether crops are scaled.
        reflects: Whether padding repeats the image mirrored instead of being black.
        jitters: Whether kernels change colors.
        erases: Whether kernels erase parts.
        mixes: Whether kernels mix images.
    """

    crops: bool
    resizes: bool
    reflects: bool
    jitters: bool
    erases: bool
    mixes: bool

    def __str__(self) -> str:
        names = {
            "crop": self.crops,
            "color jitter": self.jitters,
            "erasing": self.erases,
            "mixing": self.mixes,
        }
        return ", ".join(name for name, is_made in names.items() if is_made)


def device_changes(config: "Config") -> DeviceChanges | None:
    """Return the changes that kernels make if the device is a GPU, or None if they make none."""
    if config.augment_on == "cores" or not makes_images(config):
        return None
    crops = not (config.rotate or config.auto_augment or config.augmentation)
    changes = DeviceChanges(
        crops=crops,
        resizes=crops and crop_of(config) == "random_resized",
        reflects=crops and crop_args_of(config).get("mode") == "reflect",
        jitters=crops and any(jitter_of(config)),
        erases=config.random_erasing > 0,
        mixes=mixes(config),
    )
    return changes if changes.crops or changes.erases or changes.mixes else None


def problems(config: "Config") -> Iterable[tuple[str, str]]:
    """Yield each key of augmentation that can't work, and the problem."""
    for key, read in (("crop_args", crop_args_of), ("auto_augment_args", auto_augment_args_of)):
        try:
            read(config)
        except UserError as error:
            yield key, f"can't be used: {error}"
    if not config.rand_crop and config.crop not in (None, "center"):
        yield "crop", f"{config.crop} contradicts rand_crop: false. Remove one of them."
    yield from _bad_numbers(config)
    if config.augmentation is not None and not _names_function(config.augmentation):
        yield "augmentation", f"must be of the form package.module:function, not {config.augmentation!r}"
    if makes_images(config) and config.subtract_mean == "image":
        reason = "has a place for whole images only, not for the images that these keys make"
        yield "subtract_mean", f"image {reason}: set channel, three numbers or null"


def _bad_numbers(config: "Config") -> Iterable[tuple[str, str]]:
    jitter = config.color_jitter
    strengths = jitter if isinstance(jitter, tuple) else (jitter,)
    if isinstance(jitter, tuple) and len(jitter) not in (3, 4):
        yield "color_jitter", f"as a list has 3 or 4 numbers, for {', '.join(_JITTERS)}: {list(jitter)}"
    elif any(strength < 0 for strength in strengths):
        yield "color_jitter", f"must be at least 0, not {min(strengths)}"
    elif jitter_of(config)[3] > _MOST_HUE:
        yield "color_jitter", f"can turn hues by at most {_MOST_HUE}, not {jitter_of(config)[3]}"
    if config.mix_prob != 1 and not (config.mixup > 0 or config.cutmix > 0):
        yield "mix_prob", "needs mixup or cutmix above 0"
    if config.mix_off_epoch is not None and not mixes(config):
        yield "mix_off_epoch", "needs mixup or cutmix above 0"


def _names_function(text: str) -> bool:
    module, colon, name = text.rpartition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))
