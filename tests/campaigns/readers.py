"""All readers of files and arguments in Lockstep, and valid files for each."""

import functools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
from safetensors.torch import save

from campaigns import host_messages, peers, sources, strangers
from campaigns.sources import N_CLASSES
from lockstep.config import Config, Layer, read_command_line, read_yaml, resolve, to_yaml
from lockstep.config.rules import settle
from lockstep.data import c01b, hkl
from lockstep.data.dataset import check_content, open_dataset
from lockstep.data.manifest import digest_of_labels
from lockstep.files import checksum
from lockstep.memory.host import HostMemory
from lockstep.network.arena import Arena
from lockstep.network.build import build_model
from lockstep.optim.schedules import SCHEDULES, learning_rate
from lockstep.pretrained.weights import start_with
from lockstep.report.runlog import read_run
from lockstep.runs import checkpoint
from lockstep.runs.folder import open_run
from lockstep.runs.state import State
from preprocessing import convert
from preprocessing.make_labels import find_labels

N_IMAGES, SIZE = 8, 5
LABELS = np.arange(N_IMAGES) % N_CLASSES
Files = dict[str, bytes]


@dataclass(frozen=True)
class Reader:
    """A reader of a folder, and valid files for it.

    Attributes:
        make: Writes valid files into an empty folder.
        victims: Patterns of the files to damage.
        read: Reads the folder; raises ValueError (UserError) if it cannot.
        named: What a message may name instead of a path in the folder.
        read_one: Reads one file, where files are independent.
        may: Audit events that are allowed for this reader only.
    """

    make: Callable[[Path], None]
    victims: tuple[str, ...]
    read: Callable[[Path], object]
    read_one: Callable[[Path], object] | None = None
    named: tuple[str, ...] = ()
    may: tuple[str, ...] = ()

    @functools.cached_property
    def files(self) -> Files:
        """Return the valid files by name."""
        with tempfile.TemporaryDirectory() as place:
            self.make(Path(place))
            return {
                str(path.relative_to(place)): path.read_bytes() for path in sorted(Path(place).rglob("*.*"))
            }

    @functools.cached_property
    def bad_ones(self) -> list[str]:
        """Return the names of the files to damage."""
        return [name for name in self.files if any(Path(name).match(pattern) for pattern in self.victims)]


# -- dataset folders -----------------------------------------------------------------------------------------


def pictures_of(split: str) -> np.ndarray:
    return np.random.default_rng(len(split)).integers(0, 256, (N_IMAGES, SIZE, SIZE, 3), dtype=np.uint8)


def make_dataset(folder: Path) -> None:
    """Write a dataset whose files use HDF5's kinds of storage: contiguous, and in compressed chunks."""
    for name in ("train_hkl", "val_hkl", "labels", "misc"):
        (folder / name).mkdir()
    hkl.write(folder / "train_hkl/0000.hkl", pictures_of("train"))
    with h5py.File(folder / "val_hkl/0000.hkl", "w") as file:
        file.create_dataset("data", data=pictures_of("val"), chunks=(2, SIZE, SIZE, 3), compression="gzip")
    for split in ("train", "val"):
        np.save(folder / f"labels/{split}_labels.npy", LABELS)
    np.save(folder / "misc/img_mean.npy", np.full((SIZE, SIZE, 3), 100.5))


def make_dataset_with_manifest(folder: Path) -> None:
    make_dataset(folder)
    halves = {}
    for split in ("train", "val"):
        name = f"{split}_hkl/0000.hkl"
        path = folder / name
        sums = {"sha256": checksum(path), "labels_sha256": digest_of_labels(LABELS)}
        halves[split] = [{"file": name, "n_images": N_IMAGES, "n_bytes": path.stat().st_size, **sums}]
    others = {"misc/img_mean.npy": checksum(folder / "misc/img_mean.npy")}
    names = [f"class {number}" for number in range(N_CLASSES)]
    content = {"version": 2, "classes": names, "class_names": names, **halves, "others": others}
    (folder / "manifest.json").write_text(json.dumps(content))


def make_old_dataset(folder: Path) -> None:
    """Write a dataset like theano_alexnet: halves of batches with channels first."""
    for split in ("train", "val"):
        place = folder / f"{split}_hkl_b{N_IMAGES}_b_{N_IMAGES // 2}"
        place.mkdir()
        for half, images in enumerate(np.split(pictures_of(split), 2)):
            hkl.write_hickle2(place / f"0000_{half}.hkl", c01b.from_b01c(images))
    (folder / "labels").mkdir()
    (folder / "misc").mkdir()
    for split in ("train", "val"):
        for half, labels in enumerate(np.split(LABELS, 2)):
            np.save(folder / f"labels/{split}_labels_{half}.npy", labels)
    np.save(folder / "misc/img_mean.npy", np.full((3, SIZE, SIZE), 100.5))
    lines = [f"c{label}/{number}.jpg {label}\n" for number, label in enumerate(LABELS)]
    for split in ("train", "val"):
        (folder / f"misc/{split}.txt").write_text("".join(lines))
    np.save(folder / "misc/shuffled_train_filenames.npy", np.array([line.split()[0] for line in lines]))


def config_of(**keys: object) -> Config:
    return resolve([Layer("test", {"devices": ["cpu"], **keys})])[0]


def read_dataset(folder: Path) -> None:
    """Read a dataset like a run, to the last image."""
    n_classes = None if (folder / "manifest.json").exists() else N_CLASSES
    dataset = open_dataset(config_of(data_folder=str(folder), n_classes=n_classes))
    if dataset.manifest:
        check_content(dataset)
    for file in dataset.train.files + dataset.val.files:
        hkl.read_rows(file, 0, np.empty((min(64, file.shape[0]), *file.row_shape), np.uint8))


def read_old_dataset(folder: Path) -> None:
    read_dataset(folder)
    find_labels(folder, folder / "misc", "train")
    dataset = open_dataset(config_of(data_folder=str(folder)))
    convert.find_names(folder, "train", dataset.train)
    convert.find_classes(folder, dataset)


# -- configurations ------------------------------------------------------------------------------------------


def make_configuration(folder: Path) -> None:
    (folder / "config.yaml").write_text(
        to_yaml(config_of(model_args={"depth": 3}, lr_step=[2, 4], batch_size=8))
    )


def read_configuration(folder: Path) -> None:
    config, _ = resolve([read_yaml(folder / "config.yaml")])
    settle(config if config.devices else config_of())
    to_yaml(config)


def make_words(folder: Path) -> None:
    words = [
        "learning_rate=0.1",
        "devices=[cpu, cpu]",
        "model_args={a: [1, 2]}",
        "run_name=x",
        "lr_step=[3, 4]",
    ]
    (folder / "words.txt").write_text(
        "\n".join([*words, "global_batch_size=64", "logical_ranks=4", "resume_train=auto"])
    )


def parse_arguments(folder: Path) -> None:
    if not (folder / "words.txt").exists():  # an empty command line is valid
        return
    words = (folder / "words.txt").read_bytes().decode("utf-8", "surrogateescape").splitlines()
    settle(resolve([read_command_line(words), Layer("command line", {"devices": ["cpu"]})])[0])


# -- checkpoints and weights ---------------------------------------------------------------------------------


def network() -> torch.nn.Module:
    """Return the real smallnet, which does not depend on SIZE."""
    torch.manual_seed(0)
    return build_model(config_of(), N_CLASSES)


def make_run(folder: Path) -> None:
    (folder / "run/checkpoints").mkdir(parents=True)
    record = [{"epoch": 1, "loss": 2.0, "error_top1": 0.5, "error_top5": 0.1}]
    for epoch in (1, 2):
        state = State.now(epoch, 90, 90, 0.1, record * epoch, 1, config_of(run_name="run", lr_policy="auto"))
        checkpoint.save(
            folder / "run", {"weights/a": torch.ones(3, 2), "momenta/a": torch.zeros(3, 2)}, state
        )
    (folder / "run/config.yaml").write_text(to_yaml(config_of(run_name="run")))
    lines = ['{"event": "started", "time": 1.5e9, "versions": {"torch": "2"}}']
    lines += [
        f'{{"event": "progress", "time": 1.5e9, "epoch": 1, "step": {n}, "n_steps": 4}}' for n in (1, 2)
    ]
    lines += ['{"event": "validated", "time": 1.5e9, "epoch": 1, "error_top1": 0.5, "loss": 1.0}']
    (folder / "run/log.jsonl").write_text("\n".join(lines) + "\n")


def read_records(folder: Path) -> None:
    """Read checkpoint records like a run that resumes."""
    config = config_of(weights_dir=str(folder), run_name="run", resume_train=True, load_epoch=2, n_epochs=9)
    run = open_run(config, 90)
    with run.lock:
        if run.start:
            state = run.start.state
            checkpoint.load(run.start.path)
            for policy in SCHEDULES:
                errors = [entry["error_top1"] for entry in state.val_record]
                learning_rate(config_of(lr_policy=policy, n_epochs=9), state.epoch, errors)


def read_log(folder: Path) -> None:
    read_run(folder / "run")


def make_weights(folder: Path) -> None:
    """Write a state dict as each kind of file."""
    tensors = {name: value.contiguous() for name, value in network().state_dict().items()}
    (folder / "net.safetensors").write_bytes(save(tensors))
    torch.save({"state_dict": tensors, "epoch": 3}, folder / "zipped.pth")
    torch.save(tensors, folder / "old.pth", _use_new_zipfile_serialization=False)


def read_weights(folder: Path) -> None:
    """Initialize a network from each existing file."""
    for path in sorted(folder.iterdir()):
        begin_with(path)


def begin_with(path: Path, **keys: object) -> None:
    config = config_of(pretrained=str(path), **keys)
    model = network()
    arena = Arena(model, HostMemory(), ("momenta",))
    try:
        start_with(config, model, arena)
    finally:
        arena.block.close()  # a memory file for each of ten thousand cases would be too many


def make_theano_folder(folder: Path) -> None:
    """Write weights with smallnet's shapes: three convolutions, two fully connected layers."""
    shapes = [value.shape for value in network().state_dict().values()]
    arrays = [
        np.zeros((*shape[1:], shape[0]) if len(shape) == 4 else shape[::-1], np.float32) for shape in shapes
    ]
    for number, array in enumerate(arrays):
        np.save(folder / f"{'Wb'[number % 2]}_{number // 2}_3.npy", array)
        np.save(folder / f"mom_{number}_3.npy", array)
    np.save(folder / "lr_3.npy", np.float32(0.01))
    np.save(folder / "val_record.npy", np.full((3, 2), 0.5))
    (folder / "config.yaml").write_text("lib_conv: cudnn\n")


def read_theano_folder(folder: Path) -> None:
    begin_with(folder, pretrained_part="whole")


READERS = {
    ".hkl": Reader(make_dataset, ("*.hkl",), read_dataset),
    "labels and mean images": Reader(make_dataset, ("*.npy",), read_dataset),
    "manifests": Reader(make_dataset_with_manifest, ("manifest.json",), read_dataset),
    "folders of theano_alexnet": Reader(make_old_dataset, ("*.hkl", "*.npy", "*.txt"), read_old_dataset),
    "YAML": Reader(make_configuration, ("*.yaml",), read_configuration),
    "command lines": Reader(
        make_words,
        ("words.txt",),
        parse_arguments,
        named=("command line", "global_batch_size", "logical_ranks"),
    ),
    "checkpoint records": Reader(make_run, ("epoch_0002.json",), read_records),
    "logs of runs": Reader(make_run, ("log.jsonl", "config.yaml", "epoch_*.json"), read_log),
    "weights (.safetensors, .pth)": Reader(
        make_weights, ("*.safetensors", "*.pth"), read_weights, begin_with
    ),
    "weights of theano_alexnet": Reader(make_theano_folder, ("*.npy", "*.yaml"), read_theano_folder),
    "images": Reader(sources.make_pictures, ("*.jpg",), sources.read_pictures, sources.read_picture),
    "tars": Reader(sources.make_tars, ("*.tar",), sources.read_tars),
    "messages of a peer": Reader(peers.make_messages, ("*.bin",), peers.read_messages),
    "bytes at the rendezvous": Reader(
        strangers.make_conversation, ("*.requests",), strangers.send_to_store, may=("socket.connect",)
    ),
    "messages between hosts": Reader(
        host_messages.make_words,
        ("*%2F*.json", "invitation.json"),
        host_messages.hear_words,
        named=("host 0", "host 1", "hosts:", "rendezvous:"),
    ),
    "devkits and lists": Reader(sources.make_devkit, ("*.mat", "*.txt", "*.tar"), sources.read_devkit),
}
