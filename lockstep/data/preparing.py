"""The loader's augmentation: stored images become uint8 images of the network's size.

Training images are cropped and mirrored, then rotated, jittered and changed by a policy, then by the user's
function, and last erased in part. Validation images are cropped only. The order is torchvision's. On GPUs
kernels may make the changes (lockstep/kernels/augment.cu), as this describes them.
"""

from typing import Any

import numpy as np

from lockstep.config import Config
from lockstep.config.augmentation import DeviceChanges, crop_args_of, crop_of
from lockstep.data.augment import TORCH_FROM, mirrored_by_torch
from lockstep.data.boxes import draw_boxes, middle_box
from lockstep.data.policies import ColorJitter, changes_of
from lockstep.data.randomness import Purpose, generator
from lockstep.data.user_augmentation import UserAugmentation
from lockstep.errors import UserError

_ERASED_SCALE, _ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)  # Zhong et al. 2020, arXiv 1708.04896


class Preparer:
    """All changes of single images in their order.

    Args:
        config: The run's configuration.
        image_size: Rows and columns of stored images.
        crop_size: Rows and columns of the network's images.
        color: Each channel's value in erased parts, which become about zero after the mean's subtraction.
        on_device: The changes that kernels make.

    Raises:
        UserError: An argument does not fit the images.
    """

    def __init__(
        self,
        config: Config,
        image_size: tuple[int, int],
        crop_size: tuple[int, int],
        color: np.ndarray,
        on_device: DeviceChanges | None = None,
    ) -> None:
        self._config, self._image_size, self._size = config, image_size, crop_size
        self._on_device = on_device
        self._color = np.rint(color).clip(0, 255).astype(np.uint8)
        self._crop, self._args = crop_of(config), crop_args_of(config)
        self._changes = changes_of(config, crop_size)
        if self._changes and len(color) != 3:
            raise UserError(
                f"auto_augment, color_jitter and rotate are for images with 3 channels, not {len(color)}: "
                "leave them out"
            )
        self._own: UserAugmentation | None = None
        if self.padding and self._args["mode"] == "reflect" and self.padding >= min(image_size):
            raise UserError(
                f"crop_args: padding {self.padding} can't be reflected from images of {image_size[0]} x "
                f"{image_size[1]}: it must be below {min(image_size)}"
            )

    @property
    def padding(self) -> int:
        """Pixels that are added on each side of a training image before it is cropped."""
        return int(self._args.get("padding", 0))

    def draw(self, training: bool, epoch: int, n_samples: int) -> None:
        """Draw the choices for all samples of an epoch.

        Raises:
            UserError: The user's function can't be imported. Validation does not need it.
        """
        self._training, self._epoch = training, epoch
        if not training:
            return
        if self._config.augmentation and not self._own:
            self._own = UserAugmentation(self._config.augmentation, self._config.seed)
        if self._crop == "random_resized":
            self._boxes = self._draw_crops(generator(self._config.seed, epoch, Purpose.BOX), n_samples)
        for change in self._changes:
            change.draw(self._config.seed, epoch, n_samples)
        if self._config.random_erasing:
            random = generator(self._config.seed, epoch, Purpose.ERASE)
            spared = random.random(n_samples) >= self._config.random_erasing
            self._erased = draw_boxes(random, n_samples, self._size, _ERASED_SCALE, _ERASED_RATIO)
            self._erased[spared] = 0

    def _draw_crops(self, random: np.random.Generator, n_samples: int) -> np.ndarray:
        scale, ratio = self._args["scale"], self._args["ratio"]
        boxes = draw_boxes(random, n_samples, self._image_size, scale, ratio)
        boxes[boxes[:, 2] == 0] = middle_box(self._image_size, ratio)
        return boxes

    def apply(
        self,
        images: np.ndarray,
        rows: np.ndarray,
        drawn: np.ndarray,
        crops: np.ndarray,
        out: np.ndarray,
        samples: np.ndarray | None = None,
    ) -> None:
        """Make the network's images, without what kernels do to them later.

        Args:
            images: Stored images, uint8 (n, row, column, channel).
            rows: Their rows in the epoch's tables of choices, int64 (n,).
            drawn: The rows whose rectangles are used, int64 (n,).
            crops: First row and column of the crop, in the padded image, and whether to mirror: int32 (n, 3).
            out: uint8 (n, *crop_size, channel), overwritten.
            samples: Their sample numbers for errors, int64 (n,). None: they are the rows.

        Raises:
            UserError: The user's function fails; the message names the sample.
        """
        if self._training and self._crop == "random_resized":
            resize(images, self._boxes[drawn], crops[:, 2], out)
        else:
            padded = self._padded(images) if self._training and self.padding else images
            cut(padded, crops, out)
        if self._training:
            self._change(rows, rows if samples is None else samples, out)

    def describe(self, rows: np.ndarray, drawn: np.ndarray, crops: np.ndarray, changes: np.ndarray) -> None:
        """Describe to kernels the changes that they make, instead of `apply` or after it.

        Args:
            rows, drawn, crops: As for `apply`.
            changes: CHANGE of lockstep/loading/augment_records.py (n,), overwritten.
        """
        assert self._on_device is not None
        changes[...] = np.zeros((), changes.dtype)
        changes["box"][:, 2:], changes["order"] = self._size, -1
        if self._on_device.crops:
            self._describe_crops(drawn, crops, changes)
        for change in self._changes if self._training and self._on_device.jitters else ():
            if isinstance(change, ColorJitter):
                changes["order"], changes["factors"] = change.describe(rows)
        if self._training and self._config.random_erasing:
            changes["erased"] = self._erased[rows]
            changes["color"][:, : len(self._color)] = self._color

    def _describe_crops(self, drawn: np.ndarray, crops: np.ndarray, changes: np.ndarray) -> None:
        changes["mirror"] = crops[:, 2]
        if self._training and self._crop == "random_resized":
            changes["box"] = self._boxes[drawn]
        else:
            changes["box"][:, :2] = crops[:, :2] - (self.padding if self._training else 0)

    def _padded(self, images: np.ndarray) -> np.ndarray:
        around = self.padding, self.padding
        if self._args["mode"] == "reflect":
            return np.pad(images, ((0, 0), around, around, (0, 0)), "reflect")
        return np.pad(images, ((0, 0), around, around, (0, 0)))

    def _change(self, rows: np.ndarray, samples: np.ndarray, out: np.ndarray) -> None:
        """Change cropped images in place."""
        for image, row, sample in zip(out, rows.tolist(), samples.tolist(), strict=True):
            if self._changes:
                self._change_by_pillow(image, row)
            if self._own:
                image[...] = self._own.apply(image, self._epoch, row, sample)
        if self._config.random_erasing and not self._on_device:
            for image, box in zip(out, self._erased[rows].tolist(), strict=True):
                row, column, n_rows, n_columns = box
                image[row : row + n_rows, column : column + n_columns] = self._color

    def _change_by_pillow(self, image: np.ndarray, row: int) -> None:
        from PIL import Image  # loaders without such changes start faster

        before = changed = Image.fromarray(image)
        for change in self._changes:
            changed = change.apply(changed, row)
        if changed is not before:
            image[...] = np.asarray(changed)


def cut(images: np.ndarray, crops: np.ndarray, out: np.ndarray) -> None:
    """Copy a rectangle of each image, mirrored or not.

    Args:
        images: uint8 (n, row, column, channel).
        crops: int32 (n, 3): first row, first column, and 1 to mirror.
        out: uint8 (n, *crop_size, channel), overwritten.
    """
    n_rows, n_columns = out.shape[1:3]
    for image, (row, column, mirrored), result in zip(images, crops.tolist(), out, strict=True):
        window = image[row : row + n_rows, column : column + n_columns]
        if mirrored and n_rows >= TORCH_FROM:
            import torch

            window = mirrored_by_torch(torch.from_numpy(window)).numpy()
        elif mirrored:
            window = window[:, ::-1]
        np.copyto(result, window)


def resize(images: np.ndarray, boxes: np.ndarray, mirrors: np.ndarray, out: np.ndarray) -> None:
    """Scale a rectangle of each image to the size of `out`, bilinearly with antialiasing.

    torch's uint8 kernel is two to three times as fast as Pillow, from which it differs by 1, and by 2 in
    rare pixels of extreme contrast.

    Args:
        images: uint8 (n, row, column, channel).
        boxes: int32 (n, 4): first row, first column, rows, columns.
        mirrors: (n,): 1 to mirror.
        out: uint8 (n, *crop_size, channel), overwritten.
    """
    import torch

    sources, results, size = torch.from_numpy(images), torch.from_numpy(out), out.shape[1:3]
    for number, (box, mirrored) in enumerate(zip(boxes.tolist(), mirrors.tolist(), strict=True)):
        row, column, n_rows, n_columns = box
        # A batch of one keeps the strides of channels-last memory, in which torch takes a third of the time.
        part = sources[number : number + 1, row : row + n_rows, column : column + n_columns]
        planes: Any = part.permute(0, 3, 1, 2)
        scaled = torch.nn.functional.interpolate(planes, size, mode="bilinear", antialias=True)
        made = scaled.flip(3) if mirrored else scaled
        results[number].copy_(made.permute(0, 2, 3, 1)[0])
