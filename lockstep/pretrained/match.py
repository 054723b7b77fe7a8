"""Compares weights from elsewhere with a network, name by name and shape by shape, and says what fits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from lockstep.errors import UserError

_MOST_NAMED = 6  # in an error, which is one line
_KINDS = ("missing", "unexpected", "other shapes", "other values")


@dataclass(frozen=True)
class Match:
    """What fits, and what does not.

    problems: for each of `_KINDS`, by name, what is to be said of it. allowed: what would be a problem,
    had it not been allowed by name.
    """

    fitting: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)  # the last layer of `finetune`
    counters: list[str] = field(default_factory=list)  # batch normalisation's, which old files do not have
    problems: dict[str, dict[str, str]] = field(default_factory=lambda: {kind: {} for kind in _KINDS})
    allowed: list[str] = field(default_factory=list)

    def check(self, source: str, model: str, heads: Iterable[str]) -> None:
        """Raises UserError naming all that does not fit and was not allowed, and what to do about it.

        heads: the names of the last layer's tensors.
        """
        found = {kind: texts for kind, texts in self.problems.items() if texts}
        if not found:
            return
        names = [name for texts in found.values() for name in texts]
        advice = f"pretrained_allow: [{', '.join(_patterns(names))}] would start without them"
        if set(names) <= set(heads):
            advice = "finetune: true replaces the last layer"
        what = "; ".join(f"{kind}: {_some(list(texts.values()))}" for kind, texts in found.items())
        raise UserError(f"{source}: does not fit model {model}: {what} ({advice})")

    def lines(self) -> list[str]:
        """The report, for people."""
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
    """Sorts every name of both state dicts.

    replaced: names that stay new whatever the file has. allow: patterns (`fc8.*`) of names that may have
    any problem; such tensors stay as they are in `ours`.
    """
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
    """The kind of problem that a name has, and a text about it."""
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
    """One pattern a layer: ['fc8.*']."""
    layers = dict.fromkeys(name.rpartition(".")[0] for name in names)
    patterns = [f"{layer}.*" if layer else "*" for layer in layers]
    return [*patterns[:_MOST_NAMED], "..."] if len(patterns) > _MOST_NAMED else patterns
