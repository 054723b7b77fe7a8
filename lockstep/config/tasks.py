"""The task of a run: one class for each image (`classify`), or any number of them (`multilabel`)."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lockstep.config import Config

Task = Literal["classify", "multilabel"]
Monitor = Literal["error_top1", "loss", "macro_f1", "balanced_accuracy", "micro_f1", "mean_average_precision"]
# The values of a validation by which the best epoch can be chosen, by task; the first is the default.
MONITORED: Mapping[str, tuple[Monitor, ...]] = {
    "classify": ("error_top1", "loss", "macro_f1", "balanced_accuracy"),
    "multilabel": ("mean_average_precision", "loss", "macro_f1", "micro_f1"),
}


def is_multilabel(config: "Config") -> bool:
    """Return whether the labels of an image are a vector of 0 and 1, one number for each class."""
    return config.task == "multilabel"


def monitor_of(config: "Config") -> Monitor:
    """Return the value of a validation that says which epoch is best."""
    return config.monitor or MONITORED[config.task][0]


def monitor_in(values: Mapping[str, Any]) -> Monitor:
    """Return `monitor_of` for keys as a file holds them, which another version may have written."""
    measured = MONITORED.get(str(values.get("task")), MONITORED["classify"])
    return next((name for name in measured if name == values.get("monitor")), measured[0])


def problems(config: "Config") -> Iterable[tuple[str, str]]:
    """Yield each key that can't work with the task, and the problem."""
    measured = MONITORED[config.task]
    if config.monitor is not None and config.monitor not in measured:
        names = " or ".join(measured)
        yield "monitor", f"must be {names} with task: {config.task}, which has no {config.monitor}"
    if not is_multilabel(config):
        if config.threshold != 0.5:
            yield (
                "threshold",
                "is for task: multilabel; of one class for each image the most probable is taken",
            )
        return
    if config.loss is not None and config.class_weights is not None:
        reason = "weigh binary cross-entropy with task: multilabel"
        yield "class_weights", f"{reason}: weigh the classes in your own loss"
    if config.sampler is not None:
        yield (
            "sampler",
            "draws by the class of an image, and with task: multilabel it may have several. Remove it",
        )
