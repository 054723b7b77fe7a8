"""The recipe of config_small_images.yaml beside the same one in plain PyTorch and by timm, on Fashion-MNIST.

    python preprocessing/make_fashion_mnist.py data/fashion_png --border 2
    python preprocessing/make_hkl.py data/fashion_png data/fashion32 --size 32
    python -m benchmarks.recipes       three seeds of 8 epochs each, then 24 epochs of Lockstep with one
    python -m benchmarks.recipes --seeds 1 --epochs 2 --long 0 --out trial
    python -m benchmarks.recipes --only timm            one part alone

They train in turns, each in its own processes: Lockstep with two trainers and two loaders, the others with
two threads and two workers of their DataLoader. timm's train.py is not part of its package, so a loop of its
parts stands for it, with one seed, where timm is installed. Then Lockstep trains on a copy of the dataset
with 1 % of three classes, without and with weights and sampler. The results go to docs/results/recipes.md,
with charts; each part says when it was measured. A journal beside them resumes an interrupted run: it takes
hours on two cores.
"""

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.measure import Journal, as_line, machine, table, verdict
from benchmarks.recipes.imbalanced import RARE, thin_out
from lockstep.config import Layer, resolve
from lockstep.data.dataset import open_dataset

OURS = "Lockstep, 2 trainers"
PLAIN, TIMM = "plain PyTorch", "timm's parts"
PEERS = {PLAIN: "benchmarks.recipes.plain", TIMM: "benchmarks.recipes.by_timm"}
REMEDIES: dict[str, dict[str, str]] = {
    "none": {},
    "class_weights: balanced": {"class_weights": "balanced"},
    "sampler: balanced": {"sampler": "balanced"},
    "sampler: sqrt": {"sampler": "sqrt"},
}
ACCURACY, LONG_ACCURACY = 92.8, 93.7  # targets in percent
Part = tuple[str, dict[str, Any]]  # a section of the page, and its numbers
Curve = list[dict[str, float]]  # by epoch: epoch, error_top1, and the seconds since the first step


def ours(options: argparse.Namespace, place: Path, n_epochs: int, seed: int, **keys: str) -> Curve:
    """Train by train.py with two trainers, and return its validations."""
    given = {"data_folder": str(options.data), "devices": "[cpu, cpu]", "cpu_threads": "1"}
    given |= {"n_epochs": str(n_epochs), "snapshot_freq": str(n_epochs), "seed": str(seed)}
    given |= {"weights_dir": str(place.parent), "run_name": place.name, **keys}
    words = [f"{key}={value}" for key, value in given.items()]
    command = [sys.executable, "train.py", "--config", "config_small_images.yaml", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    names = "epoch", "error_top1", "seconds"
    return [{name: each[name] for name in names} for each in validations_of(place)]


def validations_of(run: Path) -> list[dict[str, Any]]:
    """Return the validations in a run's log, with the seconds since the first step."""
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    begin = next(event["time"] for event in events if event["event"] == "implementations")  # the first step
    return [{**each, "seconds": each["time"] - begin} for each in events if each["event"] == "validated"]


def by_peer(module: str, options: argparse.Namespace, n_epochs: int, seed: int) -> Curve:
    """Train by a peer's loop, and return its validations."""
    words = [str(options.images), str(n_epochs), str(seed)]
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def has_timm() -> bool:
    """Return whether timm and its torchvision can be imported."""
    try:
        importlib.import_module("timm")
    except Exception:  # not installed, or built for another torch
        return False
    return True


def learn_all(
    programs: Sequence[str], options: argparse.Namespace, journal: Journal, place: Path
) -> dict[str, list[Curve]]:
    """Return the curves of programs for all seeds, in turns, then Lockstep's of the long run."""
    curves: dict[str, list[Curve]] = {program: [] for program in programs}
    runs = [(program, options.epochs, seed) for seed in range(options.seeds) for program in curves]
    for program, n_epochs, seed in [*runs, *([(OURS, options.long, 0)] if options.long else [])]:

        def measure(program: str = program, n_epochs: int = n_epochs, seed: int = seed) -> Curve:
            if program in PEERS:
                return by_peer(PEERS[program], options, n_epochs, seed)
            return ours(options, place / f"balanced{n_epochs}_{seed}", n_epochs, seed)

        curves[program].append(journal.once([program, n_epochs, seed], measure))
    return curves


def balance(options: argparse.Namespace, journal: Journal, place: Path) -> dict[str, list[float]]:
    """Return each class's F1 on the imbalanced set for each remedy."""
    source = open_dataset(resolve([Layer("benchmark", {"data_folder": str(options.data)})])[0])
    folder = place / "imbalanced"
    scores: dict[str, list[float]] = {}
    for number, (name, keys) in enumerate(REMEDIES.items()):
        if not folder.exists():
            thin_out(source, folder)

        def measure(number: int = number, keys: dict[str, str] = keys) -> list[float]:
            run = place / f"remedy{number}"
            folders = {"data_folder": str(folder), "n_classes": str(source.n_classes)}
            ours(options, run, options.epochs, 0, **folders, **keys)
            return list(validations_of(run)[-1]["classes"]["f1"])

        scores[name] = journal.once(["imbalanced", name, options.epochs], measure)
    return scores


def accuracies(curves: list[Curve]) -> list[float]:
    """Return the last accuracies in percent."""
    return [100 * (1 - curve[-1]["error_top1"]) for curve in curves]


def standard_error(values: list[float]) -> float:
    """Return the standard error of the mean of several values."""
    return statistics.stdev(values) / len(values) ** 0.5


def seconds_to(curve: Curve, accuracy: float) -> str:
    """Return the seconds after which a validation has reached an accuracy in percent."""
    reached = [entry["seconds"] for entry in curve if 100 * (1 - entry["error_top1"]) >= accuracy]
    return f"{reached[0]:.0f}" if reached else "never"


def row_of(program: str, curves: list[Curve], long: list[Curve]) -> tuple[str, ...]:
    """Return a program's row of the table."""
    reached, seconds = accuracies(curves), [curve[-1]["seconds"] for curve in curves]
    accuracy = f"{statistics.mean(reached):.2f}"
    if len(reached) > 1:
        accuracy += f" +- {standard_error(reached):.2f}"
    times = ", ".join(seconds_to(curve, ACCURACY) for curve in curves)
    last = f"{accuracies(long)[0]:.2f}" if long else "-"
    return program, accuracy, ", ".join(f"{each:.0f}" for each in seconds), times, last


def comparison(program: str, mine: list[float], theirs: list[float], library: str) -> str:
    """Return a sentence on Lockstep's accuracies less a peer's."""
    difference = statistics.mean(mine) - statistics.mean(theirs)
    text = f"Lockstep's less that of {program} (with {library}): {difference:+.2f}"
    if min(len(mine), len(theirs)) < 2:
        return f"{text}, of one seed."
    error = (standard_error(mine) ** 2 + standard_error(theirs) ** 2) ** 0.5
    return f"{text}, with a standard error of {error:.2f}."


def accuracy_section(options: argparse.Namespace, curves: dict[str, list[Curve]], chart: str) -> Part:
    """Return the table of the programs and the comparison with the targets; draw the chart."""
    draw(curves, options.out / chart)
    long_head = f"{options.long} epochs, top-1 in %" if options.long else "longer"
    head = "program", "top-1 in %", "seconds, by seed", f"seconds to {ACCURACY} %, by seed", long_head
    short = {program: every[: options.seeds] for program, every in curves.items()}
    rows = [row_of(program, short[program], every[options.seeds :]) for program, every in curves.items()]
    mine = accuracies(short.pop(OURS))
    lines = [f"Accuracy: {verdict(statistics.mean(mine), ACCURACY)}."]
    for program, every in short.items():
        lines.append(comparison(program, mine, accuracies(every), str(every[0][0]["library"])))
    if options.long:
        reached = accuracies(curves[OURS])[-1]
        lines.append(f"{options.long} epochs: {verdict(reached, LONG_ACCURACY)}.")
    seeds = f"seeds 0 to {options.seeds - 1}" if options.seeds > 1 else "seed 0"
    title = f"Fashion-MNIST, ResNet-20, {options.epochs} epochs, {seeds}"
    picture = ["", f"![Accuracy by time]({chart})", ""]
    return "\n".join([table(title, [head, *rows]), *lines, *picture]), {"recipes": curves}


def imbalanced_section(options: argparse.Namespace, scores: dict[str, list[float]]) -> Part:
    """Return the table of the imbalanced set."""
    rows: list[tuple[str, ...]] = [("remedy", "macro F1 in %", "F1 of the rare classes in %")]
    for name, each in scores.items():
        rare = ", ".join(f"{100 * each[label]:.1f}" for label in RARE)
        rows.append((name, f"{100 * statistics.mean(each):.2f}", rare))
    title = f"With 1 % of the images of classes {', '.join(map(str, RARE))}, {options.epochs} epochs, seed 0"
    return table(title, rows), {"imbalanced": scores}


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Draw the accuracy by time of the runs that the programs have taken in turns."""
    n_seeds = min(map(len, curves.values()))
    figure = Figure((7, 4))
    axes = figure.add_subplot(xlabel="seconds of training", ylabel="top-1 on validation images, %")
    for number, (program, every) in enumerate(curves.items()):
        for place, curve in enumerate(every[:n_seeds]):
            points = [(entry["seconds"], 100 * (1 - entry["error_top1"])) for entry in curve]
            label = program if place == 0 else None
            axes.plot(*zip(*points, strict=True), f"C{number}", marker=".", label=label)
    axes.set_ylim(80)
    axes.axhline(ACCURACY, color="gray", linewidth=0.8)
    axes.legend()
    figure.savefig(path, dpi=110)


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recipes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each program (3)")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of each (8)")
    parser.add_argument("--long", type=int, default=24, help="epochs of one more run; 0: none (24)")
    parser.add_argument("--data", type=Path, default=Path("data/fashion32"), help="the dataset folder")
    parser.add_argument("--images", type=Path, default=Path("data/fashion_png"), help="its PNG files")
    parser.add_argument("--only", choices=list(PARTS), help="the part to measure (all)")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="where to write")
    return parser.parse_args()


def measure_recipe(options: argparse.Namespace, journal: Journal, place: Path) -> Part:
    """Compare the recipe with plain PyTorch."""
    return accuracy_section(options, learn_all([OURS, PLAIN], options, journal, place), "recipes.png")


def measure_timm(options: argparse.Namespace, journal: Journal, place: Path) -> Part:
    """Compare the recipe with plain PyTorch and with timm, with one seed."""
    if not has_timm():
        return "timm: not compared, because it or its torchvision can't be imported.", {}
    options = argparse.Namespace(**{**vars(options), "seeds": 1, "long": 0})
    return accuracy_section(options, learn_all([OURS, *PEERS], options, journal, place), "recipes_timm.png")


def measure_imbalance(options: argparse.Namespace, journal: Journal, place: Path) -> Part:
    """Compare the remedies on the imbalanced set."""
    return imbalanced_section(options, balance(options, journal, place))


PARTS = {"recipe": measure_recipe, "timm": measure_timm, "imbalance": measure_imbalance}


def write(folder: Path, measured: dict[str, Part]) -> Path:
    """Write the page with the parts that were measured now, and those of earlier that were not.

    Args:
        folder: Where to write.
        measured: The section and the numbers of each part.

    Returns:
        The page.
    """
    page, numbers = folder / "recipes.md", folder / "recipes.json"
    parts = json.loads(numbers.read_text()) if numbers.exists() else {}
    for name, (section, found) in measured.items():
        parts[name] = {"machine": machine(), "section": section, "found": found}
    lines = ["# Results of `python -m benchmarks.recipes`"]
    for name in [name for name in PARTS if name in parts]:
        lines += ["", as_line(parts[name]["machine"]), "", parts[name]["section"].rstrip("\n")]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    numbers.write_text(json.dumps(parts, indent=1) + "\n")
    return page


def main() -> None:
    options = read_command_line()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "recipes.unfinished.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        for name in [options.only] if options.only else PARTS:
            page = write(options.out, {name: PARTS[name](options, Journal(path), Path(folder))})
    path.unlink()
    print(page.read_text())


if __name__ == "__main__":
    main()
