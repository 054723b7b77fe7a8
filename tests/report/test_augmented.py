"""The contact sheet of augmentation, in the report and by `lockstep inspect --augmented`."""

from pathlib import Path

import numpy as np
import pytest
from conftest import make_config, make_folder
from own_datasets import N_CLASSES, Squares
from PIL import Image

from lockstep.data import hkl
from lockstep.data.dataset import open_dataset
from lockstep.report.augmented import N_DRAWS, N_IMAGES, augmented_images, draw_sheet
from preprocessing import inspect_data


def test_draws_differ_and_unchanged_images_come_back(shared_folder: Path) -> None:
    folder = {"data_folder": str(shared_folder)}
    stored = hkl.read(sorted((shared_folder / "train_hkl").iterdir())[0])
    plain = make_config(crop="center", rand_mirror=False, **folder)
    for images in augmented_images(plain, open_dataset(plain), (32, 32), 4):
        assert (images == stored[:4, 2:34, 2:34]).all()
    config = make_config(crop="random_resized", auto_augment="trivial", mixup=1.0, **folder)
    draws = augmented_images(config, open_dataset(config), (32, 32), 8)
    assert len(draws) == N_DRAWS and len({images.tobytes() for images in draws}) == N_DRAWS
    whole = {"crop": "random_resized", "crop_args": {"scale": [1, 1], "ratio": [1, 1]}, "rand_mirror": False}
    same = make_config(**whole, **folder)
    (first, *_) = augmented_images(same, open_dataset(same), (36, 36), 4)
    assert np.abs(first.astype(int) - stored[:4]).max() <= 1  # the mean is subtracted and added


def test_a_sampler_does_not_change_which_images_are_drawn(shared_folder: Path) -> None:
    stored = hkl.read(sorted((shared_folder / "train_hkl").iterdir())[0])
    config = make_config(data_folder=str(shared_folder), crop="center", rand_mirror=False, sampler="balanced")
    for images in augmented_images(config, open_dataset(config), (32, 32), 4):
        assert (images == stored[:4, 2:34, 2:34]).all()


def test_the_sheet_has_a_row_for_each_image_and_a_column_for_each_draw(shared_folder: Path) -> None:
    config = make_config(data_folder=str(shared_folder), crop="padded")
    sheet = draw_sheet(config, open_dataset(config), (36, 36))
    assert sheet.size == ((1 + N_DRAWS) * 100 + 8, N_IMAGES * 100 + 4)
    assert np.asarray(sheet).std(2).mean() > 1  # colored noise


def test_a_small_first_file_leaves_no_row_out(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "set", n_train=32)
    (whole,) = (folder / "train_hkl").iterdir()
    config = make_config(data_folder=str(folder), crop="padded")
    expected = draw_sheet(config, open_dataset(config), (36, 36))
    images = hkl.read(whole)
    hkl.write(whole, images[:4])
    hkl.write(whole.with_name("0001.hkl"), images[4:])
    sheet = draw_sheet(config, open_dataset(config), (36, 36))
    assert sheet.height == N_IMAGES * 100 + 4 and sheet.tobytes() == expected.tobytes()


def test_a_dataset_of_python_objects_has_a_sheet() -> None:
    config = make_config(data="own_datasets:make_squares", n_classes=N_CLASSES, crop="padded")
    sheet = draw_sheet(config, open_dataset(config), (36, 36))
    assert sheet.size == ((1 + N_DRAWS) * 100 + 8, N_IMAGES * 100 + 4)
    image = Image.fromarray(Squares(90, 0)[N_IMAGES - 1][0]).resize((96, 96), Image.Resampling.BILINEAR)
    assert sheet.crop((4, sheet.height - 100, 100, sheet.height - 4)).tobytes() == image.tobytes()


def test_inspect_draws_it_with_the_keys_of_file_and_command_line(
    shared_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, given = tmp_path / "mine.yaml", [str(shared_folder), "--n_classes", "7", "--out", str(tmp_path)]
    file.write_text("crop: random_resized\nseed: 1\n")
    words = [*given, "--augmented", "--crop", "32", "--config", str(file), "auto_augment=rand"]
    assert inspect_data.main(words) == 0
    config = make_config(data_folder=str(shared_folder), crop="random_resized", seed=1, auto_augment="rand")
    expected = draw_sheet(config, open_dataset(config), (32, 32))
    assert (np.asarray(Image.open(tmp_path / "augmented.png")) == np.asarray(expected)).all()
    for more, message in (
        (["--augmented", "crop=paded"], "did you mean 'padded'?"),
        (["--augmented", "--crop", "37"], "36 x 36 pixels. Set --crop to a number from 1 to 36."),
        (["crop=padded"], "are for --augmented, which is missing. --n_classes is for both."),
    ):
        assert inspect_data.main([*given, *more]) == 2
        assert message in capsys.readouterr().err
