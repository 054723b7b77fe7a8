"""Which rule keeps trainers one (lockstep/sync), and what can't be combined with it, without torch."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from lockstep.optim import OPTIMIZERS

if TYPE_CHECKING:
    from lockstep.config import Config

RuleName = Literal["auto", "weights", "gradients"]


def rule_of(config: "Config") -> RuleName:
    """The rule of a run. A lone trainer takes its own steps, as in `weights`, and has nobody to meet."""
    if len(config.devices) <= 1:
        return "weights"
    if config.rule != "auto":
        return config.rule
    exact = config.exchange == "swap" or not (OPTIMIZERS[config.optimizer].inexact or config.clip_norm)
    return "weights" if exact else "gradients"


def problems(config: "Config") -> Iterable[tuple[str, str]]:
    """Keys that can't work, and what is wrong with each."""
    if config.exchange == "swap" and config.rule not in ("auto", "weights"):
        yield "exchange", f"swap averages whole arenas: it goes with rule: weights only, not {config.rule}"
