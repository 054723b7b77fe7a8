"""ImageNet in every form that people have it, from its files to labels that belong to their images."""

import io
import os
import shutil
import tarfile
from pathlib import Path

import imagenet
import numpy as np
import pytest
import scipy.io
from conftest import make_config
from dataset_folders import read_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from imagenet import ILSVRC_IDS, N_TRAIN, N_VAL, WNIDS, WORDS, ImageNet

from lockstep.data import hkl
from lockstep.data.dataset import open_dataset
from lockstep.errors import UserError
from preprocessing import caffe_lists, devkit, make_hkl, tars
from preprocessing.make_labels import find_labels

SIZES = ("--size", "16", "--batch", "8", "--workers", "1")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ImageNet:
    return imagenet.build(tmp_path_factory.mktemp("imagenet"))


@pytest.fixture(scope="module")
def from_folders(small: ImageNet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "set"
    assert make(small.folders, folder) == 0
    return folder


def make(*words: object) -> int:
    return make_hkl.main([*map(str, words), *SIZES])


def test_labels_are_places_of_sorted_wnids_and_belong_to_their_images(from_folders: Path) -> None:
    dataset = open_dataset(make_config(data_folder=str(from_folders), n_classes=None))
    assert (len(dataset.train), len(dataset.val)) == (5 * N_TRAIN, N_VAL)
    assert dataset.manifest.classes == tuple(WNIDS) and dataset.manifest.class_names == tuple(WORDS)
    for split in (dataset.train, dataset.val):
        images = np.concatenate([hkl.read(file.path) for file in split.files])
        assert [imagenet.label_of(image) for image in images] == split.labels.tolist()
    assert dataset.val.labels.tolist() == [(7 * n) % 5 for n in range(N_VAL)]


def test_tars_and_lists_give_the_same_bytes_as_folders(
    small: ImageNet, from_folders: Path, tmp_path: Path
) -> None:
    expected = read_all(from_folders)
    assert make(small.tars, tmp_path / "tars") == 0
    assert read_all(tmp_path / "tars") == expected
    lists = ("--traintxt_filename", small.lists / "train.txt", "--valtxt_filename", small.lists / "val.txt")
    paths = ("--train_img_dir", small.folders / "train", "--val_img_dir", small.folders / "val")
    kit = ("--meta_clsloc_mat", small.tars / "ILSVRC2012_devkit_t12.tar.gz")
    assert make(*lists, *paths, *kit, "--tar_root_dir", tmp_path / "lists") == 0
    assert read_all(tmp_path / "lists") == expected


def test_lists_beside_the_folders_are_found(small: ImageNet, from_folders: Path, tmp_path: Path) -> None:
    for path in small.folders.iterdir():
        if path.name in ("train", "val"):
            (tmp_path / path.name).symlink_to(path)
    for split in ("train", "val"):
        text = (small.lists / f"{split}.txt").read_text()
        (tmp_path / f"{split}.txt").write_text(text.replace(" 1\n", " 5\n"))  # labels are the lists'
    assert make(tmp_path, tmp_path / "set") == 0
    dataset = open_dataset(make_config(data_folder=str(tmp_path / "set"), n_classes=None))
    assert dataset.manifest.classes == ("0", "1", "2", "3", "4", "5")  # 1 has no folder
    expected = np.load(from_folders / "labels" / "train_labels.npy")
    assert dataset.train.labels.tolist() == np.where(expected == 1, 5, expected).tolist()


def test_classes_tars_one_level_unpacked(small: ImageNet, from_folders: Path, tmp_path: Path) -> None:
    shutil.unpack_archive(small.tars / "ILSVRC2012_img_train.tar", tmp_path / "train")
    assert make("--train_img_dir", tmp_path / "train", small.folders, tmp_path / "set") == 0
    assert read_all(tmp_path / "set") == read_all(from_folders)


def test_paths_yaml_and_toy(small: ImageNet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = tmp_path / "paths.yaml"
    paths.write_text(
        f"train_img_dir: {small.folders}/train/\nval_img_dir: {small.folders}/val/\n"
        f"meta_clsloc_mat: {small.folders}/ILSVRC2012_devkit_t12/data/meta.mat\n"
        f"val_label_file: {small.folders}/ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt\n"
        f"tar_root_dir: {tmp_path}/set\ntar_train_dir: {tmp_path}/set/train_hkl\n"
        f"misc_dir: {tmp_path}/set/misc\nvaltxt_filename: {tmp_path}/set/misc/val.txt\n"
    )
    small_sizes = ("--size", "8", "--batch", "2", "--workers", "1")
    assert make_hkl.main(["toy", "--paths", str(paths), *small_sizes]) == 0
    for split in ("train", "val"):
        assert len(list((tmp_path / "set" / f"{split}_hkl").iterdir())) == 10
    assert np.load(tmp_path / "set/labels/train_labels.npy").shape == (20,)
    paths.write_text(paths.read_text().replace("/set/misc\n", "/other\n"))
    assert make("--paths", paths) == 2
    assert "misc_dir: " in (said := capsys.readouterr().err) and "a dataset is one folder" in said


def test_what_is_missing_is_named(
    small: ImageNet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ("--train_img_dir", small.folders / "train", "--val_img_dir", small.folders / "val")
    assert make(*paths, "--tar_root_dir", tmp_path / "set") == 2
    assert "--meta_clsloc_mat" in capsys.readouterr().err
    assert make(*paths) == 2
    assert "tar_root_dir: is not given" in capsys.readouterr().err
    assert make(small.folders) == 2
    assert "give SOURCE and TARGET" in capsys.readouterr().err


@given(data=st.data())
def test_every_label_of_any_devkit_is_that_of_its_wnid(data: st.DataObject) -> None:
    """Against the definition: the place of the wnid among the sorted wnids of the training folders."""
    wnids = data.draw(st.lists(st.from_regex(r"n\d{8}", fullmatch=True), min_size=1, max_size=9, unique=True))
    ids = data.draw(st.permutations(range(1, len(wnids) + 1)))
    truth = data.draw(st.lists(st.sampled_from(ids), max_size=30))
    kit = devkit.Devkit("meta.mat", dict(zip(ids, wnids, strict=True)), {})
    names = [f"ILSVRC2012_val_{number + 1:08d}.JPEG" for number in range(len(truth))]
    labels = devkit.label_flat(names, kit, truth, sorted(wnids), "val")
    assert [sorted(wnids)[label] for label in labels] == [wnids[ids.index(number)] for number in truth]


def test_ground_truth_that_does_not_fit_is_refused() -> None:
    kit = devkit.Devkit("meta.mat", {1: "n1", 2: "n2"}, {})
    names = ["v_00000001.JPEG", "v_00000003.JPEG"]
    with pytest.raises(UserError, match="image 2 in order is v_00000003"):
        devkit.label_flat(names, kit, [1, 2], ["n1", "n2"], "val")
    with pytest.raises(UserError, match="holds 2 images, the ground truth has 3"):
        devkit.label_flat(names, kit, [1, 2, 1], ["n1", "n2"], "val")
    with pytest.raises(UserError, match="which is not among the 1 classes"):
        devkit.label_flat(["a", "b"], kit, [1, 2], ["n1"], "val")


def test_meta_of_2014_and_broken_ones(tmp_path: Path) -> None:
    rows = [(np.array(i), np.array(wnid), np.array("x")) for i, wnid in zip(ILSVRC_IDS, WNIDS, strict=True)]
    synsets = np.array(rows, [("ILSVRC2014_ID", "O"), ("WNID", "O"), ("words", "O")]).reshape(1, -1)
    path = tmp_path / "meta_clsloc.mat"
    scipy.io.savemat(path, {"synsets": synsets})
    assert devkit.read_meta(path).wnids == dict(zip(ILSVRC_IDS, WNIDS, strict=True))
    content = path.read_bytes()
    scipy.io.savemat(path, {"other": 1})
    with pytest.raises(UserError, match=r"meta_clsloc\.mat: is not ImageNet's"):
        devkit.read_meta(path)
    for length in (0, 50, len(content) // 2):
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match=r"meta_clsloc\.mat: is not ImageNet's"):
            devkit.read_meta(path)
    (tmp_path / "truth.txt").write_text("1\n2\nx\n")
    with pytest.raises(UserError, match="line 3 is not a class number"):
        devkit.read_ground_truth(tmp_path / "truth.txt")


@given(
    st.lists(st.tuples(st.from_regex(r"[\w/.-][\w /.-]{0,20}[\w]", fullmatch=True), st.integers(0, 999999)))
)
def test_lists_read_back(tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, int]]) -> None:
    path = tmp_path_factory.mktemp("list") / "train.txt"
    caffe_lists.write_list(path, lines)
    assert caffe_lists.read_list(path) == lines


@pytest.mark.parametrize("line", ["a.jpg", "a.jpg x", "a.jpg -1", "7", "a.jpg 1.0", "a.jpg 99999999999"])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "t.txt").write_text(f"good.jpg 0\n{line}\n")
    with pytest.raises(UserError, match=r"t\.txt: line 2 is not 'path label'"):
        caffe_lists.read_list(tmp_path / "t.txt")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_truncated_and_damaged_tars_are_named(small: ImageNet, tmp_path: Path, data: st.DataObject) -> None:
    """A damaged tar gives a UserError with its name; damage outside headers changes no listing.

    A truncated one is never taken for a whole one."""
    whole = (small.tars / "ILSVRC2012_img_train.tar").read_bytes()
    path = tmp_path / "bad.tar"
    cut = data.draw(st.booleans(), "cut")
    place = data.draw(st.integers(0, len(whole) - 1), "place")
    damage = data.draw(st.binary(min_size=1, max_size=600), "damage")
    content = whole[:place] if cut else whole[:place] + damage + whole[place + len(damage) :]
    path.write_bytes(content)
    expected = tars.list_train_tar(small.tars / "ILSVRC2012_img_train.tar", [])
    try:
        found = tars.list_train_tar(path, [])
    except UserError as error:
        assert str(path) in str(error)
        return
    assert not cut or set(whole[place:]) == {0}
    if not damage_hits_a_header(whole, place, len(damage)):
        assert [picture[:2] for picture in found[1]] == [picture[:2] for picture in expected[1]]


def damage_hits_a_header(whole: bytes, place: int, length: int) -> bool:
    """Return whether the damaged bytes are a header of the outer tar or of one in it, or zeros at an end."""
    data = []
    with tarfile.open(fileobj=io.BytesIO(whole)) as outer:
        for member in outer:
            with tarfile.open(fileobj=outer.extractfile(member)) as inner:
                data += [
                    (member.offset_data + one.offset_data, member.offset_data + one.offset_data + one.size)
                    for one in inner
                ]
    return not any(start <= place and place + length <= end for start, end in data)


def test_a_train_tar_without_classes_and_other_files(small: ImageNet, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no tars of classes"):
        tars.list_train_tar(small.tars / "ILSVRC2012_img_val.tar", [])
    (tmp_path / "x.tar").write_bytes(os.urandom(4096))
    with pytest.raises(UserError, match=r"x\.tar"):
        tars.list_train_tar(tmp_path / "x.tar", [])


def test_make_train_val_txt_and_make_labels_alone(
    small: ImageNet, from_folders: Path, tmp_path: Path
) -> None:
    from preprocessing import make_labels, make_train_val_txt

    assert make_train_val_txt.main([str(small.tars), str(tmp_path)]) == 0
    for split in ("train", "val"):
        expected = (small.lists / f"{split}.txt").read_text()
        assert (tmp_path / f"{split}.txt").read_text() == expected
        assert (from_folders / "misc" / f"{split}.txt").read_text() == expected
    kept = read_all(from_folders / "labels")
    for name in kept:
        (from_folders / "labels" / name).unlink()
    assert make_labels.main([str(from_folders), "--lists", str(tmp_path)]) == 0
    assert read_all(from_folders / "labels") == kept


@pytest.mark.parametrize(
    ("listed", "order", "labels"),
    [
        ("cat/1.jpg 0\ndog/2.jpg 1\n", "dog/2.jpg 9\ncat/1.jpg 9\n", [1, 0]),
        ("cat/1.jpg 0\ndog/2.jpg 1\n", "/old/train/dog/2.jpg 9\n/old/train/cat/1.jpg 9\n", [1, 0]),
        ("1.jpg 0\n2.jpg 1\n", "/old/train/dog/2.jpg 9\n", [1]),
        ("cat/1.jpg 0\ndog/2.jpg 1\n", "2.jpg 9\n", [1]),
        ("cat/1.jpg 0\n", "cat/1.jpg 9\ndog/1.jpg 9\n", None),
        ("cat/1.jpg 0\ndog/1.jpg 1\n", "1.jpg 9\n", None),
    ],
)
def test_make_labels_takes_no_label_of_another_image(
    listed: str, order: str, labels: list[int] | None, tmp_path: Path
) -> None:
    """Images of several classes may have the same name."""
    (tmp_path / "misc").mkdir()
    (tmp_path / "misc" / "train.txt").write_text(listed)
    (tmp_path / "misc" / "train_order.txt").write_text(order)
    if labels is None:
        with pytest.raises(UserError, match=r"train\.txt: has no line for (dog/)?1\.jpg, which is in"):
            find_labels(tmp_path, tmp_path / "misc", "train")
    else:
        assert find_labels(tmp_path, tmp_path / "misc", "train").tolist() == labels
