"""Valid files of each kind that preprocessing reads, and their readers."""

import io
import tarfile
from pathlib import Path

import numpy as np
import scipy.io
from PIL import Image

from preprocessing import caffe_lists, devkit, tars
from preprocessing.images import Geometry
from preprocessing.listing import SourceImage
from preprocessing.tasks import ImageBatch

N_CLASSES = 3


def packed_picture(kind: str, mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> bytes:
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    more = {"exif": exif} if kind in ("JPEG", "PNG", "WEBP") else {}
    Image.fromarray(pixels).convert(mode).save(file, kind, **more)
    return file.getvalue()


def make_pictures(folder: Path) -> None:
    """Write images, some with the extension of another format, as in ImageNet."""
    kinds = [("JPEG", "RGB"), ("JPEG", "CMYK"), ("JPEG", "L"), ("PNG", "RGBA"), ("WEBP", "RGB"), ("GIF", "P")]
    for number, (kind, mode) in enumerate([*kinds, ("BMP", "RGB"), ("PNG", "I;16"), ("PNG", "1")]):
        content = packed_picture(kind, mode) if mode != "I;16" else packed_picture(kind, "L")
        (folder / f"{number}.jpg").write_bytes(content)


def read_pictures(folder: Path) -> None:
    for path in sorted(folder.glob("*.jpg")):
        read_picture(path)


def read_picture(path: Path) -> None:
    for geometry in (Geometry(16, "squash"), Geometry(16, "crop", "apply"), Geometry(8, "pad")):
        ImageBatch((SourceImage(path.name, 0, str(path)),), (), geometry, "stop").load()


def tar_of(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def make_tars(folder: Path) -> None:
    picture = packed_picture("JPEG", size=(16, 16))
    classes = [{f"n{number}_{image}.JPEG": picture for image in (0, 1)} for number in (0, 1)]
    inner = {f"n{number}.tar": tar_of(members) for number, members in enumerate(classes)}
    (folder / "train.tar").write_bytes(tar_of(inner))
    (folder / "val.tar").write_bytes(tar_of({f"ILSVRC2012_val_{n:08d}.JPEG": picture for n in (1, 2, 3)}))


def read_tars(folder: Path) -> None:
    pictures = tars.list_train_tar(folder / "train.tar", [])[1] + tars.list_flat_tar(folder / "val.tar", [])
    for picture in pictures:
        ImageBatch((picture,), (), Geometry(8), "stop").load()


def make_devkit(folder: Path) -> None:
    fields = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O")]
    synsets = np.array([(n + 1, f"n{n}", f"word {n}") for n in range(N_CLASSES)], fields)
    scipy.io.savemat(folder / "meta.mat", {"synsets": synsets}, do_compression=True)
    (folder / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n2\n3\n")
    members = {f"kit/data/{path.name}": path.read_bytes() for path in sorted(folder.glob("*.*"))}
    (folder / "kit.tar").write_bytes(tar_of(members))
    (folder / "train.txt").write_text("".join(f"n{n}/{n}.jpg {n}\n" for n in range(N_CLASSES)))


def read_devkit(folder: Path) -> None:
    for name in ("meta.mat", "kit.tar"):
        kit = devkit.read_meta(folder / name)
        truth = devkit.read_ground_truth(
            folder / ("kit.tar" if name == "kit.tar" else "ILSVRC2012_validation_ground_truth.txt")
        )
        names = [f"x_{number}.JPEG" for number in range(1, N_CLASSES + 1)]
        devkit.label_flat(names, kit, truth, sorted(kit.words), str(folder))
    caffe_lists.list_from_files(folder / "train.txt", folder, folder / "train.txt", folder)
