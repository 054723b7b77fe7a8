"""Looking at a dataset folder: the sheet shows what the network sees, and a bad file is named."""

from pathlib import Path

import imagenet
import numpy as np
import pytest
from PIL import Image

from lockstep.data import hkl
from preprocessing import contact_sheet, inspect_data, make_hkl
from preprocessing.contact_sheet import Sample


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inspect")
    words = ["--size", "36", "--batch", "16", "--workers", "1"]
    assert make_hkl.main([str(imagenet.build(root / "imagenet").folders), str(root / "set"), *words]) == 0
    return root / "set"


def test_sheet_histogram_and_mean_are_written(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect_data.main([str(made), "--images", "8", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "45 training images of 36 x 36 in 3 files" in said and "9 to 9 of each of 5 classes" in said
    assert "11 good, 0 bad" in said
    with Image.open(tmp_path / "mean.png") as mean:
        stored = np.load(made / "misc" / "img_mean.npy")
        assert np.abs(np.asarray(mean) - stored).max() <= 0.5
    sheet = np.asarray(Image.open(tmp_path / "contact_sheet.png"))
    assert sheet.shape == (2 * 172 + 8, 4 * 272 + 8, 3)
    # the stored image of each cell is of one colour, whose red is 50 x its label
    reds = [int(sheet[8 + row * 172 + 64, 8 + column * 272 + 64, 0]) for row in (0, 1) for column in range(4)]
    assert all(min(abs(red - 50 * label) for label in range(5)) <= 4 for red in reds)
    assert np.asarray(Image.open(tmp_path / "labels.png")).std() > 0


def test_what_the_network_sees_is_cropped_mirrored_and_without_mean(made: Path) -> None:
    words = inspect_data.read_command_line([str(made), "--images", "60"])
    dataset = inspect_data.open_dataset(
        inspect_data.resolve([inspect_data.Layer("test", {"data_folder": str(made)})])[0]
    )
    names = dataset.manifest.class_names
    found = inspect_data.take_samples(dataset, "train", dataset.train, names, 32, words)
    assert len(found) == 30
    for sample in found:
        label = imagenet.label_of(sample.stored)
        assert sample.title == f"train {label}: {imagenet.WORDS[label]}"
        assert sample.name.startswith(imagenet.WNIDS[label] + "/")
        expected = sample.stored[16, 16] - dataset.mean[16, 16]
        assert sample.seen.shape == (32, 32, 3) and np.abs(sample.seen[16, 16] - expected).max() < 12
    assert len({sample.name for sample in found}) == 30


def test_a_bad_file_is_named(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made / "train_hkl" / "0001.hkl"
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[-7] ^= 1
    path.write_bytes(damaged)
    assert inspect_data.main([str(made), "--out", str(tmp_path)]) == 1
    assert "train_hkl/0001.hkl: its checksum is not the manifest's" in capsys.readouterr().err
    path.write_bytes(content[:5000])
    assert inspect_data.main([str(made), "--out", str(tmp_path)]) == 2
    assert "0001.hkl" in capsys.readouterr().err
    path.write_bytes(content)


def test_a_folder_without_a_manifest(shared_folder: Path, tmp_path: Path, capsys) -> None:
    assert inspect_data.main([str(shared_folder), "--out", str(tmp_path)]) == 2
    assert "n_classes" in capsys.readouterr().err
    assert inspect_data.main([str(shared_folder), "--out", str(tmp_path), "--n_classes", "7"]) == 0
    assert "there are no checksums to compare: 5 good" in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(12, 9, 1), (9, 12, 2), (1, 1, 4)])
def test_images_of_any_shape_and_number_of_channels_are_drawn(shape: tuple[int, ...], tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        images = random.integers(0, 256, (5, *shape), dtype=np.uint8)
        for name in (f"{split}_hkl", "labels", "misc"):
            (tmp_path / name).mkdir(exist_ok=True)
        hkl.write(tmp_path / f"{split}_hkl" / "0000.hkl", images)
        np.save(tmp_path / "labels" / f"{split}_labels.npy", np.zeros(5, np.int64))
        np.save(tmp_path / "misc" / "img_mean.npy", images.mean(0))
    assert inspect_data.main([str(tmp_path), "--n_classes", "1"]) == 0
    assert Image.open(tmp_path / "inspect" / "mean.png").size == (shape[1], shape[0])
    assert (tmp_path / "inspect" / "contact_sheet.png").exists()


def test_any_text_can_be_drawn() -> None:
    image = np.zeros((20, 20, 3), np.uint8)
    sample = Sample(image, image.astype(np.float32), "Hündchen \U0001f415 \udcff" * 20, "")
    assert contact_sheet.draw_sheet([sample], 2).size == (2 * 272 + 8, 180)
    many = np.arange(1000)
    assert contact_sheet.draw_histogram({"training": many}, ("ü",) * 1000).width >= 1000


def test_a_name_of_two_lines_is_drawn_on_one() -> None:
    image = np.zeros((20, 20, 3), np.uint8)
    sample = Sample(image, image.astype(np.float32), "train 0: cat\ndog", "")
    assert contact_sheet.draw_sheet([sample], 1).size == (272 + 8, 180)
    assert contact_sheet.draw_histogram({"training": np.arange(2)}, ("a\nb", "c")).height == 196


def test_letters_beyond_ascii_are_drawn_as_such() -> None:
    image = np.zeros((20, 20, 3), np.uint8)
    sheets = {
        contact_sheet.draw_sheet([Sample(image, image.astype(np.float32), text, "")], 1).tobytes()
        for text in ("?", "u", "ü", "ß", "é", "Ж", "π")
    }
    assert len(sheets) == 7
