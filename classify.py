"""Says what a trained network sees in pictures: the five most probable classes of each.

    python classify.py photo.jpg                       by the newest run in runs/
    python classify.py *.jpg --run runs/try1 --epoch 12

Pictures are taken as they come from a camera (turned as its note says) and made square as the run's dataset
was; the network sees the middle. Runs on the CPU. Exit code 0, or 2 where something can't be used; a picture
that can't is named, and the others are still done.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch

from lockstep.comm.messages import Order
from lockstep.data.augment import Augmenter
from lockstep.data.dataset import Dataset, open_dataset
from lockstep.errors import UserError
from lockstep.launch.console import show
from lockstep.loading import Batch
from lockstep.memory.host import HostMemory
from lockstep.network.replica import Replica, open_trained
from lockstep.runs import folder as runfolder
from preprocessing.pictures import BadPicture, Geometry, to_image
from validate import open_checkpoint

N_ANSWERS = 5


def main() -> int:
    try:
        words = read_words()
        folder = words.run or runfolder.newest(words.runs)
        config, checkpoint = open_checkpoint(folder, words.epoch, ["devices=[cpu]", *words.override])
        dataset = open_dataset(config)
        config = dataclasses.replace(config, batch_size=1)
        replica, dataset = open_trained(config, dataset, HostMemory(), checkpoint.path)
    except UserError as error:
        show(f"lockstep: {error}", "stderr")
        return 2
    show(f"{checkpoint.path}, epoch {checkpoint.state.epoch}", "stdout")
    done = [classify(Path(picture), replica, dataset) for picture in words.pictures]
    return 0 if all(done) else 2


def read_words() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("pictures", nargs="+", metavar="PICTURE", help="a file: JPEG, PNG, WebP ...")
    parser.add_argument("--run", type=Path, help="a run's folder (default: the newest in --runs)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of runs (runs)")
    parser.add_argument(
        "--epoch", type=int, help="the checkpoint of this epoch (default: the newest whole one)"
    )
    parser.add_argument(
        "--override", nargs="*", default=[], metavar="key=value", help="override the run's configuration"
    )
    return parser.parse_args()


def classify(picture: Path, replica: Replica, dataset: Dataset) -> bool:
    """Prints the answers for one picture. Returns whether it could be used."""
    try:
        image = read_picture(picture, dataset)
    except (OSError, BadPicture) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        show(f"lockstep: {picture}: can't be used: {reason}", "stderr")
        return False
    probabilities = replica.log_probabilities(batch_of_one(image, replica, dataset))[0].exp()
    show(f"{picture}:", "stdout")
    best = probabilities.topk(min(N_ANSWERS, len(probabilities)))
    for probability, label in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        show(f"  {probability:7.2%}  {dataset.class_names[label]}", "stdout")
    return True


def read_picture(path: Path, dataset: Dataset) -> np.ndarray:
    """uint8 (size, size, 3), as the dataset's pictures. Raises OSError or BadPicture."""
    resize = dataset.manifest.resize if dataset.manifest else "squash"
    return to_image(path.read_bytes(), Geometry(dataset.image_shape[0], resize, "apply"))


def batch_of_one(image: np.ndarray, replica: Replica, dataset: Dataset) -> Batch:
    """The middle of the picture, less the mean, as the network takes it."""
    size = replica.crop_size
    corner = [(side - size) // 2 for side in dataset.image_shape[:2]]
    out = np.empty((1, size, size, 3), np.float32)
    Augmenter(dataset.mean, size).apply(image[None], np.array([[*corner, 0]]), out)
    nothing = torch.zeros(1, dtype=torch.int64)
    images = torch.from_numpy(out).permute(0, 3, 1, 2)
    return Batch(Order("val", 1, 1, 0, 1, 0, 1), images, nothing, nothing)


if __name__ == "__main__":
    sys.exit(main())
