"""The tables and the targets of a run on a GPU, from its JSON file and nothing else."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.measure import table

Figures = dict[str, Any]
Rows = list[tuple[str, ...]]


def targets(sections: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets beside the measured figures; `met` is None where a figure is missing."""
    figures = {name: section["figures"] for name, section in sections.items()}
    steps = figures.get("alexnet", {}).get("steps", {})
    rates = [step["images_per_second"] for name, step in steps.items() if name.startswith("Lockstep bf16")]
    kernel = figures.get("exchange", {}).get("the kernel on one GPU", {})
    found = [
        _target("AlexNet in bf16, images/s", 90_000, max(rates, default=None)),
        _target("exchange kernel's GB/s, of a copy's", 0.7, kernel.get("kernel_share_of_copy")),
    ]
    for name, case in figures.get("loading", {}).get("cases", {"loading": {}}).items():
        wait = case.get("load_wait_share")
        found.append(_target(f"{name}: images from files, of resident", 0.98, case.get("share_of_resident")))
        found.append(_target(f"{name}: load-wait, of a step", 0.01, wait, at_most=True))
    return found


def _target(what: str, aim: float, figure: float | None, at_most: bool = False) -> dict[str, Any]:
    met = None
    if figure is not None:
        met = figure <= aim if at_most else figure >= aim
    sign = "at most" if at_most else "at least"
    return {"what": what, "target": f"{sign} {aim:,g}", "figure": figure, "met": met}


def markdown(run: dict[str, Any]) -> str:
    """The whole run as Markdown."""
    title = "Results of `benchmarks/gpu.sh`"
    if run["rehearsal"]:
        title = "REHEARSAL on a simulated driver: no figure below means anything"
    lines = [f"# {title}", "", _machine(run["machine"]), ""]
    rows: Rows = [("section", "how it went", "s")]
    for name, section in run["sections"].items():
        reason = f": {section['reason']}".replace("|", "/") if section["reason"] else ""
        rows.append((name, section["status"] + reason, f"{section['seconds']:.0f}"))
    lines.append(table("Sections", rows))
    rows = [("what", "target", "measured", "")]
    for aim in run["targets"]:
        figure = "not measured" if aim["figure"] is None else f"{aim['figure']:,.4g}"
        rows.append(
            (aim["what"], aim["target"], figure, {True: "met", False: "missed", None: ""}[aim["met"]])
        )
    lines.append(table("Targets", rows))
    for name, tables in _TABLES.items():
        lines.extend(tables(run["sections"].get(name, {}).get("figures", {})))
    for name, section in run["sections"].items():
        lines.extend(_problems(name, section))
    return "\n".join(lines).rstrip() + "\n"


def _machine(machine: dict[str, Any]) -> str:
    facts = [f"{key} {value}" for key, value in machine.items() if key != "gpus"]
    for number, gpu in enumerate(machine["gpus"]):
        facts.append(f"GPU {number}: " + ", ".join(f"{key} {value}" for key, value in gpu.items()))
    return ", ".join(facts)


def _problems(name: str, section: dict[str, Any]) -> Iterator[str]:
    if section["status"] == "failed":
        yield f"### What failed in {name}\n"
        yield f"{section['reason']}\n"
        yield from (f"- {what}: {' '.join(words.split())}" for what, words in section["problems"].items())
        yield "\n```\n" + "\n".join(section["last_lines"]) + "\n```\n"


def _tests(figures: Figures) -> Iterator[str]:
    if "counts" in figures:
        names = ("passed", "failed", "skipped")
        rows: Rows = [names, tuple(str(figures["counts"][name]) for name in names)]
        yield table('Tests that need a GPU: pytest -m "gpu or multigpu"', rows)


def _alexnet(figures: Figures) -> Iterator[str]:
    if "steps" in figures:
        rows: Rows = [("step", "images/s", "of the roofline", "ms", "least to most", "host, ms")]
        for name, step in figures["steps"].items():
            share = f"{step['share_of_roofline']:.1%}" if "share_of_roofline" in step else ""
            rate = f"{step['images_per_second']:,.0f}", share
            spread = f"{step['least_ms']:.3f} to {step['most_ms']:.3f}"
            rows.append((name, *rate, f"{step['ms']:.3f}", spread, f"{step['host_ms']:.3f}"))
        yield table("AlexNet's training step (theano_alexnet's form) on a resident batch of 256", rows)
        yield (
            "Plain PyTorch is in bf16. torchvision's network is another one: smaller convolutions, no "
            "normalisation, 224 x 224. Host: the time to issue a step to an idle device.\n"
        )
    for gpu in figures.get("clocks_after", []):
        yield "After it: " + ", ".join(f"{key} {value}" for key, value in gpu.items()) + ".\n"
    if "ceilings" in figures:
        numbers = figures["ceilings"]
        yield (
            f"Roofline: {numbers['roofline']:,.0f} images/s. A kernel of a step in bf16 takes at least the "
            "longer of two times: its operations at 790 TFLOP/s, its bytes at 4.3 TB/s, which an H200 has "
            "shown before (benchmarks/gpu/roofline.py). In this run this card showed "
            f"{numbers['bf16_tflops']:,.0f} TFLOP/s in a product of bfloat16 matrices and "
            f"{numbers['copy_gb_per_second'] / 1e3:.2f} TB/s in a copy: {numbers['roofline_here']:,.0f} "
            "images/s by those.\n"
        )
    yield from _milliseconds("Stages of a step on the device, ms", "stages_ms", figures)
    yield from _milliseconds("Phases of Lockstep's recorder, ms", "phases_ms", figures)
    yield from _profiles(figures)


def _preflight(figures: Figures) -> Iterator[str]:
    rows: Rows = [("probe", "what it found")]
    for name, found in figures.items():
        parts = found.items() if isinstance(found, dict) else [("", found)]
        words = (f"{key} {_short(value)}" for key, value in parts)
        rows.append((name, ", ".join(words).strip()))
    if len(rows) > 1:
        yield table("Preflight", rows)


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _layers(figures: Figures) -> Iterator[str]:
    if "layers" in figures:
        rows: Rows = [("layer, bf16, forward and backward", "ms")]
        rows += [(name, f"{found['ms']:.4f}") for name, found in figures["layers"].items()]
        yield table("AlexNet's layers by themselves", rows)


def _steps(title: str, figures: Figures, what: str = "step, bf16") -> Iterator[str]:
    if "steps" in figures:
        rows: Rows = [(what, "images/s", "ms", "host, ms")]
        for name, step in figures["steps"].items():
            rate = f"{step['images_per_second']:,.0f}"
            rows.append((name, rate, f"{step['ms']:.3f}", f"{step['host_ms']:.3f}"))
        yield table(title, rows)


def _profiles(figures: Figures) -> Iterator[str]:
    for name, kernels in figures.get("profiles", {}).items():
        rows: Rows = [("kernel", "ms a step", "launches a step")]
        rows += [(key.replace("|", "/"), f"{ms:.4f}", f"{n:.1f}") for key, ms, n in kernels]
        yield table(f"{name}: its kernels, by torch.profiler", rows)


def _milliseconds(title: str, key: str, figures: Figures) -> Iterator[str]:
    parts = {name: part[key] for name, part in figures.get("stages", {}).items() if key in part}
    if parts:
        names = list(next(iter(parts.values())))
        rows: Rows = [("step", *names)]
        rows += [(name, *(f"{part[column]:.3f}" for column in names)) for name, part in parts.items()]
        yield table(title, rows)


def _loading(figures: Figures) -> Iterator[str]:
    if "cases" in figures:
        rows: Rows = [("bf16", "resident", "from files", "of resident", "load-wait", "loader alone")]
        for name, case in figures["cases"].items():
            resident, loaded, loader = (
                f"{case[f'{kind}_images_per_second']:,.0f}" for kind in ("resident", "loaded", "loader")
            )
            wait = f"{case['load_wait_share']:.2%}" if "load_wait_share" in case else ""
            shares = f"{case['share_of_resident']:.1%}", wait
            rows.append((name, resident, loaded, *shares, loader))
        yield table("Images/s from files by a loader process, beside a resident batch", rows)
    if "peer" in figures:
        rates = (f"{name} {_short(found)}" for name, found in figures["peer"].items())
        yield f"Peers that load the same files, images/s without training: {', '.join(rates)}.\n"
    if "reader" in figures:
        found = ", ".join(f"{name} {rate:,.0f}" for name, rate in figures["reader"].items())
        yield f"Reading from the page cache: {found}.\n"
    if "faster" in figures:
        yield f"Faster: {figures['faster']}.\n"
    if "copies" in figures:
        rate, limit = figures["copies"]["gb_per_second"], figures["copies"]["images_per_second"]
        yield f"Copies from page-locked memory: {rate:.1f} GB/s, so at most {limit:,.0f} images/s.\n"


def _exchange(figures: Figures) -> Iterator[str]:
    for place in ("one GPU", "two GPUs"):
        part = figures.get(f"the kernel on {place}")
        if part:
            rows: Rows = [("rank 0 alone", "GB/s, read and written", "of the copy")]
            for what in ("kernel", "copy"):
                rate = part[f"{what}_gb_per_second"]
                rows.append((what, f"{rate:,.0f}", f"{rate / part['copy_gb_per_second']:.0%}"))
            yield table(f"The averaging kernel, two ranks on {place}", rows)
            yield f"Proof of peer access: {', '.join(part['proof'])}.\n"
        part = figures.get(f"exchanges on {place}")
        if part:
            rows = [("exchange", "ms", "equals the mean to the bit")]
            for name, milliseconds in part["ms"].items():
                equal = {True: "yes", False: "NO", None: "not compared"}[part["equals the mean"].get(name)]
                rows.append((name, f"{milliseconds:.3f}", equal))
            yield table(f"Averaging 61 M weights and 61 M momenta, two ranks on {place}", rows)
    if "NCCL" in figures:
        yield f"NCCL: {figures['NCCL']}.\n"


def _table1(figures: Figures) -> Iterator[str]:
    if "runs" in figures:
        head = ("train.py, AlexNet, bf16", "s per 20 iterations of 256", "images/s", "load-wait", "exchange")
        rows: Rows = [head]
        for name, run in figures["runs"].items():
            shares = run["shares"]
            numbers = f"{run['seconds_per_20']:.3f}", f"{run['images_per_second']:,.0f}"
            exchange = shares["exchange"] + shares["barrier"]
            rows.append((name, *numbers, f"{shares['load-wait']:.1%}", f"{exchange:.1%}"))
        yield table("theano_alexnet's report in its own form; two ranks on one GPU are no speed-up", rows)


def _functions(figures: Figures) -> Iterator[str]:
    if "functions" in figures:
        yield f"lockstep.synk: {figures['functions']}.\n"
    heads = {
        "calls": "call",
        "steps": "step of SGD, an MLP of 784-500-500-10",
        "paper": "step of SGD, ResNet-50 in float32 (Stooke and Abbeel 2017, section 6)",
    }
    for name, head in heads.items():
        if name in figures:
            rows: Rows = [(head, "ms"), *((what, f"{ms:.3f}") for what, ms in figures[name].items())]
            yield table(f"lockstep.synk's {name}, two ranks on one GPU (which is no speed-up)", rows)


def _flow(figures: Figures) -> Iterator[str]:
    if "us an operation" in figures:
        rows: Rows = [("one small operation behind another", "us")]
        rows += [(name, f"{value:.1f}") for name, value in figures["us an operation"].items()]
        yield table("flow: the gap between launches", rows)
    title = "flow: ResNet-50's step in bf16 on resident samples"
    yield from _steps(title, figures, "ResNet-50, a batch of 256")
    if "merging" in figures:
        found = figures["merging"]
        yield (
            f"A step on two devices takes {found['beside backward']:.3f} ms with merging beside backward, "
            f"{found['at its end']:.3f} ms with merging at its end; merging alone takes "
            f"{found['alone']:.3f} ms. So {found['share hidden']:.0%} of it is hidden.\n"
        )
    if "images_per_second" in figures:
        rows = [("devices", "ResNet-50, images/s, 128 a device")]
        rows += [(name, f"{value:,.0f}") for name, value in figures["images_per_second"].items()]
        yield table("flow: images a second", rows)


def _hosts(figures: Figures) -> Iterator[str]:
    if "sums of a group of one" in figures:
        part = figures["sums of a group of one"]
        rows: Rows = [(f"{part['floats']:,} floats in our memory, by {part['library']}", "ms")]
        yield table(
            "A host's sums, by itself", [*rows, *((name, f"{ms:.3f}") for name, ms in part["ms"].items())]
        )
    for name, found in figures.items():
        if name.startswith("two hosts"):
            words = (
                found
                if isinstance(found, str)
                else ", ".join(f"{key}: {_short(value)}" for key, value in found.items())
            )
            yield f"{name[0].upper()}{name[1:]}: {words}.\n"


_TABLES: dict[str, Callable[[Figures], Iterator[str]]] = {
    "preflight": _preflight,
    "alexnet": _alexnet,
    "layers": _layers,
    "compiled": partial(_steps, "Beside torch.compile"),
    "loading": _loading,
    "tests": _tests,
    "tests2": _tests,
    "exchange": _exchange,
    "precisions": _alexnet,
    "table1": _table1,
    "resnet50": partial(_steps, "ResNet-50's training step on a resident batch of 256"),
    "functions": _functions,
    "flow": _flow,
    "hosts": _hosts,
}
