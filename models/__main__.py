"""Prints the table of networks in docs/models.md: python -m models"""

import importlib
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from lockstep.text import handle_closed_pipe

CASES: tuple[tuple[str, int, dict[str, bool]], ...] = (
    ("smallnet", 10, {}),
    ("resnet20", 10, {}),
    ("alexnet", 1000, {}),
    ("googlenet", 1000, {}),
    ("vgg16", 1000, {}),
    ("vgg16", 1000, {"batch_norm": True}),
    ("resnet50", 1000, {}),
)


def row(name: str, n_classes: int, args: dict[str, bool]) -> tuple[str, ...]:
    """Return the table's row of a network, built on torch's meta device, which allocates no memory."""
    with torch.device("meta"):
        model = importlib.import_module(f"models.{name}").Model(n_classes, **args)
        image = torch.empty(1, 3, model.input_size, model.input_size)
        with FlopCounterMode(display=False) as counter:
            model.eval()(image)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    title = ", ".join([name, *(f"`{key}: {str(value).lower()}`" for key, value in args.items())])
    size = f"{model.input_size} x {model.input_size}"
    return title, size, str(n_classes), f"{n_parameters:,}", f"{counter.get_total_flops() / 2e6:,.0f} M"


def table() -> str:
    """Return the table in Markdown, one line for each network."""
    head = ("`model`", "images", "classes", "parameters", "multiply-adds an image")
    rows = [head, ("---",) * len(head), *(row(*case) for case in CASES)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


if __name__ == "__main__":
    files = {path.stem for path in Path(__file__).parent.glob("[!_]*.py")}
    assert files == {name for name, _, _ in CASES}, "a network is missing from the table"
    handle_closed_pipe()
    print(table())
