"""Datasets that are Python objects: a length, and items (image, label) by number.

Datasets of torchvision and Hugging Face are used as they are. An image is a uint8 array (rows, columns) or
(rows, columns, channels), a uint8 tensor (channels, rows, columns), or an image of Pillow.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config import Config
from lockstep.config.tasks import is_multilabel
from lockstep.data.split import Split
from lockstep.errors import UserError, first_line
from lockstep.objects import SOURCE, import_function, load_object

if TYPE_CHECKING:
    from PIL import Image

NAMES = {"train": "train_data", "val": "val_data"}  # of the arguments of lockstep.train
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}  # Pillow's, by channels
_ORIENTATION = 0x0112  # the EXIF tag
_CHANNELS = {"1": 1, "L": 1, "I": 1, "LA": 2, "RGBA": 4}  # of Pillow's modes; others become RGB


def load_datasets(config: Config) -> tuple[Any, Any]:
    """Return the training and validation dataset that the key `data` names.

    Raises:
        UserError: The function can't be imported, fails, or does not return two datasets.
    """
    assert config.data is not None
    module_name, _, name = config.data.rpartition(":")
    is_passed = module_name == SOURCE
    pair = load_object("data", name) if is_passed else _make_datasets(config.data)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UserError(f"data: {config.data} must return (train, val), not {type(pair).__name__}")
    return pair[0], pair[1]


def _make_datasets(name: str) -> Any:
    function = import_function("data", name)
    try:
        return function()
    except Exception as error:  # the user's code
        raise UserError(f"data: {name} fails: {type(error).__name__}: {first_line(error)}") from error


def length_of(data: Any, name: str) -> int:
    """Return the length of a dataset. Raise UserError if it has none, or no items."""
    try:
        n_items = len(data)
    except Exception as error:  # the user's code
        raise UserError(
            f"{name}: has no length: {type(error).__name__}: {first_line(error)}. "
            "A dataset has __len__ and __getitem__, so that any sample can be read at any time."
        ) from error
    if n_items < 1:
        raise UserError(f"{name}: holds no items")
    return n_items


Label = int | np.ndarray  # a class, or with `task: multilabel` 0 or 1 for each class: uint8 (class,)


def item_of(data: Any, index: int, name: str, multilabel: bool = False) -> tuple[Any, Label]:
    """Return (image, label) of an item.

    Args:
        data: The dataset.
        index: The item's number.
        name: The dataset's name, for messages.
        multilabel: Whether a label is a vector of 0 and 1.

    Raises:
        UserError: The item can't be read, or is no image with a label. The message names it.
    """
    where = f"{name}: item {index}"
    try:
        item = data[index]
    except Exception as error:  # the user's code
        raise UserError(f"{where} can't be read: {type(error).__name__}: {first_line(error)}") from error
    if isinstance(item, Mapping):
        image, label = _columns_of(item, where, multilabel)
    elif isinstance(item, tuple | list) and len(item) == 2:
        image, label = item
    else:
        raise UserError(f"{where} must be (image, label), not {_describe(item)}")
    if multilabel:
        return image, _vector(label, where)
    try:
        return image, _whole(label)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        hint = " (task: multilabel takes vectors of 0 and 1)" if _is_vector(label) else ""
        raise UserError(f"{where} has the label {label!r:.60}, which is no whole number{hint}") from None


def _is_vector(label: Any) -> bool:
    return isinstance(label, list | tuple) or getattr(label, "ndim", 0) == 1


def _vector(label: Any, where: str) -> np.ndarray:
    """Return a label of 0 and 1 as uint8 (class,). Raise UserError if it is something else."""
    try:
        values = np.asarray(label.tolist() if hasattr(label, "tolist") else label)
    except ValueError:  # lists of several lengths
        values = np.empty(0, object)
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "biuf" or not _is_binary(values):
        raise UserError(
            f"{where} has the label {label!r:.60}. With task: multilabel it must be 0 or 1 for each class."
        )
    return values.astype(np.uint8)


def _is_binary(values: np.ndarray) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def _whole(label: Any) -> int:
    """Return a label as int; it may also be a number of NumPy or torch, such as 3.0."""
    value = label.item() if hasattr(label, "item") else label
    if not isinstance(value, int) and (value is label or int(value) != value):
        raise TypeError
    return int(value)


def check_label(label: Label, n_classes: int, where: str) -> None:
    """Raise UserError unless a label is one of the classes, or has a number for each of them."""
    if isinstance(label, np.ndarray):
        if len(label) != n_classes:
            raise UserError(
                f"{where} has a label of {len(label)} numbers, not of one for each of {n_classes} classes "
                f"(n_classes: {n_classes})"
            )
        return
    if not 0 <= label < n_classes:
        raise UserError(
            f"{where} has label {label}, not one of 0 to {n_classes - 1} (n_classes: {n_classes})"
        )


def _columns_of(item: Mapping[str, Any], where: str, multilabel: bool) -> tuple[Any, Any]:
    """Return the image and the label of a row of named columns."""
    images = [key for key, value in item.items() if _is_image(value)]
    labels = [key for key, value in item.items() if isinstance(value, int) or getattr(value, "ndim", 1) == 0]
    if multilabel:
        labels = [key for key, value in item.items() if _is_vector(value)]
    chosen = []
    for kind, keys in (("image", images), ("label", labels)):
        usual = next((name for name in (kind, f"{kind}s") if name in keys), None)
        key = usual or (keys[0] if len(keys) == 1 else None)
        if key is None:
            raise UserError(
                f"{where} has {len(keys)} columns that may be the {kind}, of {', '.join(item)}. "
                f"Rename one to '{kind}'."
            )
        chosen.append(item[key])
    return chosen[0], chosen[1]


def _is_image(value: Any) -> bool:
    return _is_pillow(value) or getattr(value, "ndim", 0) in (2, 3)


def _is_pillow(value: Any) -> bool:
    return hasattr(value, "getbands") and hasattr(value, "convert")


def _describe(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", "")
    return type(value).__name__ if shape is None else f"{dtype} of shape {tuple(shape)}"


def channels_of(image: Any) -> int:
    """Return the channels, 1 to 4, that an image has or is converted to."""
    if _is_pillow(image):
        return _CHANNELS.get(image.mode.partition(";")[0], 3)
    shape = tuple(getattr(image, "shape", ()))
    return 1 if len(shape) == 2 else int(shape[0] if hasattr(image, "permute") else shape[-1]) if shape else 0


def pixels_of(image: Any, n_channels: int, where: str) -> np.ndarray:
    """Return the pixels of an image: uint8 (rows, columns, n_channels).

    Images of Pillow are turned upright (EXIF) and converted; arrays must have the channels.

    Raises:
        UserError: `where` has no such image.
    """
    if _is_pillow(image):
        return _pixels_of_pillow(image, n_channels, where)
    array = image.detach().cpu().numpy() if hasattr(image, "permute") else np.asarray(image)
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise UserError(
            f"{where} has an image that is {_describe(array)}. It must be uint8, (rows, columns, channels), "
            "or an image of Pillow. Leave out transforms such as ToTensor: Lockstep normalizes images."
        )
    if array.ndim == 2:
        array = array[:, :, None]
    elif hasattr(image, "permute"):
        array = array.transpose(1, 2, 0)
    if array.shape[2] not in _MODES or 0 in array.shape:
        raise UserError(f"{where} has an image of shape {array.shape}. Give it pixels of 1 to 4 channels.")
    if array.shape[2] != n_channels:
        raise UserError(f"{where} has an image of shape {array.shape}; this run's have {n_channels} channels")
    return array


def _pixels_of_pillow(image: Any, n_channels: int, where: str) -> np.ndarray:
    from PIL import Image  # loaders of files start faster

    try:
        image.load()
        check_range(image)
        turn = turn_of(image)
        upright = image if turn is None else image.transpose(turn)
        if upright.mode.startswith("I"):  # 16 bits per pixel, which convert() would clip
            levels = np.asarray(upright).astype(np.int64) >> 8
            upright = Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))
        if n_channels in (1, 3) and upright.has_transparency_data:
            background = Image.new("RGBA", upright.size, "white")
            background.alpha_composite(upright.convert("RGBA"))
            upright = background
        # A copy: torch warns of arrays that can't be written.
        pixels = np.array(upright.convert(_MODES[n_channels]))
    except Exception as error:  # Pillow reads some files when their pixels are used
        raise UserError(f"{where} has an image that can't be used: {first_line(error)}") from error
    return pixels[:, :, None] if n_channels == 1 else pixels


def check_range(image: Any) -> None:
    """Raise ValueError if it is not known which value of an image of Pillow is white."""
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        kind = "floating-point" if image.mode == "F" else "signed or 32-bit"
        raise ValueError(f"holds {kind} pixels, whose range is not known: save it with 8 or 16 bits")


def turn_of(image: Any) -> "Image.Transpose | None":
    """Return how to make an image of Pillow upright by its EXIF data; None: no turn, or damaged data."""
    from PIL.Image import Transpose  # loaders of files start faster

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        return turns.get(image.getexif().get(_ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # Pillow raises many types, also SyntaxError; the pixels are good all the same
        return None


def resized(pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return an image in another size, as preprocessing makes files: bilinear with antialiasing.

    Args:
        pixels: uint8 (rows, columns, channel).
        rows: Of the result.
        columns: Of the result.
    """
    if pixels.shape[:2] == (rows, columns):
        return pixels
    import torch

    image = torch.from_numpy(np.ascontiguousarray(pixels))[None].permute(0, 3, 1, 2)
    scaled = torch.nn.functional.interpolate(image, (rows, columns), mode="bilinear", antialias=True)
    result: np.ndarray = scaled.permute(0, 2, 3, 1)[0].numpy()
    return result


def class_names_of(data: Any) -> tuple[str, ...]:
    """Return the names of the classes, as Hugging Face's or torchvision's datasets have them, or ()."""
    features = getattr(data, "features", None)
    if isinstance(features, Mapping):
        named = {key: getattr(feature, "names", None) for key, feature in features.items()}
        of_label = [named[key] for key in ("label", "labels") if key in named][:1]
        lists = of_label or [names for names in named.values() if names]
        return tuple(map(str, lists[0] or ())) if len(lists) == 1 else ()
    classes = getattr(data, "classes", None)
    if isinstance(classes, list | tuple) and classes:
        return tuple(map(str, classes))
    inner = getattr(data, "dataset", None)  # of torch.utils.data.Subset
    return class_names_of(inner) if inner is not None else ()


def known_labels_of(data: Any, n_items: int, multilabel: bool = False) -> np.ndarray | None:
    """Return all labels if a dataset has them beside its images: its `targets` or `labels`.

    They are int64 (n,), or with `multilabel` uint8 (n, class).
    """
    for name in ("targets", "labels"):
        values = getattr(data, name, None)
        if values is None or callable(values):
            continue
        try:
            labels = np.asarray(values)
        except (TypeError, ValueError):  # a tensor on a GPU; lists of several lengths
            continue
        if multilabel:
            if labels.ndim == 2 and len(labels) == n_items and _is_binary(labels):
                return labels.astype(np.uint8)
            continue
        if labels.shape == (n_items,) and labels.dtype.kind in "iu":
            return labels.astype(np.int64)
    return None


class ItemSplit(Split):
    """The items of one dataset object, which is loaded when the first one is read.

    Args:
        config: Names the datasets.
        split: 'train' or 'val'.
        n_items: The number of items.
        image_shape: (rows, columns, channels) to which images are brought.
        n_classes: The number of classes.
    """

    def __init__(
        self, config: Config, split: str, n_items: int, image_shape: tuple[int, ...], n_classes: int
    ) -> None:
        self._config, self._is_train, self._name = config, split == "train", NAMES[split]
        self._n_items, self._shape, self._n_classes = n_items, image_shape, n_classes
        self._data: Any = None
        self._is_multilabel = is_multilabel(config)
        shape = (n_items, n_classes) if self._is_multilabel else (n_items,)
        self._labels = np.zeros(shape, np.uint8 if self._is_multilabel else np.int64)
        self._is_read = np.zeros(n_items, bool)

    @property
    def labels(self) -> np.ndarray:
        labels = known_labels_of(self._loaded(), self._n_items, self._is_multilabel)
        if labels is None:
            raise UserError(
                f"{self._name}: its labels must be known before its items are read. "
                "Give it an attribute `targets`, one label for each item."
            )
        # The first that is no class. Of several classes, all rows have the length of row 0.
        suspect = 0 if self._is_multilabel else int(np.argmax((labels < 0) | (labels >= self._n_classes)))
        check_label(labels[suspect], self._n_classes, f"{self._name}: item {suspect}")
        return labels

    @property
    def file_rows(self) -> tuple[int, ...]:
        return (1,) * self._n_items

    @property
    def image_shape(self) -> tuple[int, ...]:
        return self._shape

    def __len__(self) -> int:
        return self._n_items

    def read(self, file: int, first: int, out: np.ndarray, retries: int = 0) -> None:
        """Read an item. It is not read again after an error, whose kind only the dataset knows."""
        assert first == 0 and len(out) == 1
        data, where = self._loaded(), f"{self._name}: item {file}"
        try:
            image, label = item_of(data, file, self._name, self._is_multilabel)
        except UserError as error:
            if (now := length_of(data, self._name)) < self._n_items:
                raise UserError(
                    f"{error} (the dataset had {self._n_items:,} items at the start and has {now:,} now)"
                ) from error
            raise
        check_label(label, self._n_classes, where)
        rows, columns, n_channels = self._shape
        out[0] = resized(pixels_of(image, n_channels, where), rows, columns)
        self._labels[file], self._is_read[file] = label, True

    def labels_of(self, samples: np.ndarray) -> np.ndarray:
        assert self._is_read[samples].all(), "a label was used before its item was read"
        labels: np.ndarray = self._labels[samples]
        return labels

    def name_of(self, file: int) -> str:
        return f"{self._name} item {file}"

    def _loaded(self) -> Any:
        """Return the dataset object. Raise UserError if it is shorter than at the start."""
        if self._data is None:
            data = load_datasets(self._config)[0 if self._is_train else 1]
            if (now := length_of(data, self._name)) != self._n_items:
                raise UserError(f"{self._name}: has {now:,} items, and had {self._n_items:,} at the start")
            self._data = data
        return self._data
