"""Contents of dataset folders and manifests."""

import json
from pathlib import Path

import numpy as np

from lockstep.data.manifest import digest_of_labels
from lockstep.files import checksum


def read_all(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a folder, by its relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def write_true_manifest(folder: Path) -> None:
    """Write a manifest with the checksums of all files."""
    write_manifest(folder)
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    for entry in content["train"] + content["val"]:
        entry["sha256"] = checksum(folder / entry["file"])
    others = ("labels/train_labels.npy", "labels/val_labels.npy", "misc/img_mean.npy")
    content["others"] = {name: checksum(folder / name) for name in others}
    path.write_text(json.dumps(content))


def write_manifest(folder: Path) -> None:
    """Write a manifest of the folder that also lists misc/slow, which does not exist."""

    def entries(split: str) -> list[dict[str, object]]:
        labels = np.load(folder / "labels" / f"{split}_labels.npy")
        paths = sorted((folder / f"{split}_hkl").iterdir())
        return [
            {
                "file": f"{split}_hkl/{path.name}",
                "n_images": len(labels[32 * number : 32 * number + 32]),
                "n_bytes": path.stat().st_size,
                "sha256": "0" * 64,
                "labels_sha256": digest_of_labels(labels[32 * number : 32 * number + 32]),
            }
            for number, path in enumerate(paths)
        ]

    halves = {split: entries(split) for split in ("train", "val")}
    content = {"version": 2, "classes": list("abcdefg"), **halves, "others": {"misc/slow": "0" * 64}}
    (folder / "manifest.json").write_text(json.dumps(content))
