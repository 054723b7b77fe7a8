"""The comparison of pretrained weights with a network, by name and shape."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from lockstep.errors import UserError, nearest

_MOST_NAMED = 6  # names in an error, which is one line
_KINDS = ("missing", "unexpected", "other shapes", "other values")


@dataclass(frozen=True)
class Match:
    """The tensors that fit a network, and those that do not.

    Attributes:
        fitting: Names of tensors to load.
        replaced: Names of the last layer's tensors with `new_head`.
        counters: Missing counters of batch normalization, which old files do not have.
        problems: For each of `_KINDS`, a text about each tensor by its name.
        allowed: Names of tensors whose problems `pretrained_allow` permits.
    """

    fitting: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    counters: list[str] = field(default_factory=list)
    problems: dict[str, dict[str, str]] = field(default_factory=lambda: {kind: {} for kind in _KINDS})
    allowed: list[str] = field(default_factory=list)

    def check(self, source: str, model: str, heads: Iterable[str]) -> None:
        """Check that there are no problems.

        Args:
            source: The origin of the weights, for the message.
            model: The name of the model, for the message.
            heads: The names of the last layer's tensors.

        Raises:
            UserError: A tensor does not fit and is not allowed. The message names a remedy.
        """
        found = {kind: texts for kind, texts in self.problems.items() if texts}
        if not found:
            return
        names = [name for texts in found.values() for name in texts]
        advice = f"pretrained_allow: [{', '.join(_patterns(names))}] would start without them"
        if set(names) <= set(heads):
            advice = "new_head: true replaces the last layer"
        what = "; ".join(f"{kind}: {_some(list(texts.values()))}" for kind, texts in found.items())
        raise UserError(f"{source}: does not fit model {model}: {what} ({advice})")

    def lines(self) -> list[str]:
        """Return the lines of the report."""
        counts = ", ".join(f"{kind} {len(texts)}" for kind, texts in self.problems.items())
        lines = [f"matched {len(self.fitting)} tensors, {counts}"]
        if self.replaced:
            lines.append(f"new, as the last layer is to be replaced: {', '.join(self.replaced)}")
        if self.counters:
            lines.append(f"not in the file and left at 0: {len(self.counters)} counters of batches")
        return [*lines, *(f"allowed by name: {text}" for text in self.allowed)]


def compare(
    theirs: Mapping[str, torch.Tensor],
    ours: Mapping[str, torch.Tensor],
    replaced: Iterable[str] = (),
    allow: Iterable[str] = (),
) -> Match:
    """Sort the names of both state dicts by whether they fit.

    Args:
        theirs: The pretrained state dict.
        ours: The network's state dict.
        replaced: Names that are not loaded.
        allow: Patterns (`fc8.*`) of names that may have any problem. Their tensors are not loaded.

    Raises:
        UserError: A pattern matches no name.
    """
    allow = list(allow)
    for pattern in allow:
        if not any(fnmatchcase(name, pattern) for name in (*ours, *theirs)):
            suggestion = nearest(pattern, (*ours, *theirs))
            raise UserError(
                f"pretrained_allow: no tensor of the file or the network matches {pattern!r}{suggestion}"
            )
    match, replaced = Match(), set(replaced)
    for name in (*ours, *(name for name in theirs if name not in ours)):
        if name in replaced:
            match.replaced.append(name)
        elif name not in theirs and name.endswith(".num_batches_tracked"):
            match.counters.append(name)
        elif not (problem := _problem(name, theirs.get(name), ours.get(name))):
            match.fitting.append(name)
        elif any(fnmatchcase(name, pattern) for pattern in allow):
            match.allowed.append(" ".join(problem))
        else:
            match.problems[problem[0]][name] = problem[1]
    return match


def _problem(name: str, theirs: torch.Tensor | None, ours: torch.Tensor | None) -> tuple[str, str] | None:
    """Return the kind of problem of a tensor and a text about it, or None."""
    if theirs is None:
        return "missing", name
    if ours is None:
        return "unexpected", name
    if theirs.shape != ours.shape:
        return "other shapes", f"{name} {tuple(theirs.shape)}, not {tuple(ours.shape)}"
    if theirs.is_floating_point() != ours.is_floating_point():
        return "other values", f"{name} {theirs.dtype}, not {ours.dtype}".replace("torch.", "")
    if not theirs.isfinite().all():
        return "other values", f"{name} not finite"
    return None


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return ", ".join(texts[:_MOST_NAMED]) + more


def _patterns(names: Iterable[str]) -> list[str]:
    """Return one pattern per layer, such as 'fc8.*'."""
    layers = dict.fromkeys(name.rpartition(".")[0] for name in names)
    patterns = [f"{layer}.*" if layer else "*" for layer in layers]
    return [*patterns[:_MOST_NAMED], "..."] if len(patterns) > _MOST_NAMED else patterns
