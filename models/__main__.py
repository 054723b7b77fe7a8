"""Prints the table of networks in docs/models.md: python -m models"""

import importlib
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

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
    """Of a network on torch's meta device, which has shapes and no memory."""
    with torch.device("meta"):
        model = importlib.import_module(f"models.{name}").Model(n_classes, **args)
        picture = torch.empty(1, 3, model.input_size, model.input_size)
        with FlopCounterMode(display=False) as counter:
            model.eval()(picture)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    shown = ", ".join([name, *(f"`{key}: {str(value).lower()}`" for key, value in args.items())])
    size = f"{model.input_size} x {model.input_size}"
    return shown, size, str(n_classes), f"{n_parameters:,}", f"{counter.get_total_flops() / 2e6:,.0f} M"


def table() -> str:
    """Markdown, one line a network."""
    head = ("`model`", "pictures", "classes", "parameters", "multiply-adds a picture")
    rows = [head, ("---",) * len(head), *(row(*case) for case in CASES)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


if __name__ == "__main__":
    there = {path.stem for path in Path(__file__).parent.glob("[!_]*.py")}
    assert there == {name for name, _, _ in CASES}, "a network is missing from the table"
    print(table())
