"""The configuration of a run: config.yaml, then the spec, then the command line; the later one wins.

Every key is a field of `Config`. A key that is not, a value of the wrong type, a key given twice in one file
and an impossible combination are each a `UserError` that names the file and the key. `yaml.safe_load` rules
apply: nothing in a YAML file is ever executed.
"""

import dataclasses
import difflib
import json
import math
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from lockstep.errors import UserError
from lockstep.typed import convert, describe

COMMAND_LINE = "command line"
# PyYAML lets the errors of int(), float() and date() through for tags like !!int x, and recursion for deep
# nesting.
_YAML_ERRORS = (yaml.YAMLError, ValueError, AttributeError, RecursionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Every key that config.yaml, a spec and the command line may hold, with its default."""

    # What to train
    model: str = "smallnet"  # models/<model>.py
    model_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of its Model
    seed: int = 0

    # Resuming
    resume_train: bool = False
    load_epoch: int | Literal["latest"] = "latest"

    # Learning
    n_epochs: int = 20
    learning_rate: float = 0.01
    lr_policy: Literal["step", "auto"] = "step"
    lr_adapt_threshold: float = 0.01  # auto: least fall of the validation error in two epochs
    lr_step: tuple[int, ...] = (20, 40)  # step: the rate falls to a tenth after these epochs
    use_momentum: bool = True
    use_nesterov_momentum: bool = False
    momentum: float = 0.9
    weight_decay: float = 0.0005

    # Data
    data_folder: str = "./data/digits"
    train_folder: str | None = None  # null: <data_folder>/train_hkl
    val_folder: str | None = None  # null: <data_folder>/val_hkl
    label_folder: str | None = None  # null: <data_folder>/labels
    mean_file: str | None = None  # null: <data_folder>/misc/img_mean.npy
    n_classes: int | None = None  # null: as the dataset's manifest says
    subtract_mean: Literal["image", "channel"] = "image"  # the mean image, or one mean per colour channel
    check_sums: bool = False  # compare every file with the manifest's checksum before the start
    rand_crop: bool = True
    rand_mirror: bool = True
    batch_crop_mirror: bool = False  # one crop and mirror for a whole minibatch
    shuffle: Literal["none", "batches", "blocks"] = "blocks"
    shuffle_block: int = 16  # rows (images) in a block of `shuffle: blocks`
    para_load: bool = True
    n_slots: int = 3  # minibatches in a loader's ring

    # Where to train
    devices: tuple[str, ...] = ()
    batch_size: int = 32  # per trainer
    cpu_threads: int | None = None  # null: the cores, divided among the trainers
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"  # of products; weights are float32 always
    deterministic: bool = False  # GPUs: the same bits in every run
    cuda_graph: bool = False  # GPUs: a step is captured once and replayed
    exchange: Literal["auto", "p2p", "staged", "swap"] = "auto"  # GPUs
    augment_on: Literal["trainer", "loader"] = "trainer"  # GPUs: which process runs the kernel
    wait_deadline: float = 120.0  # seconds that one process waits for another

    # Output
    weights_dir: str = "./runs"
    run_name: str | None = None  # null: <model>-<date>-<time>
    snapshot_freq: int = 5  # epochs
    print_train_error: bool = True
    print_freq: int = 20  # steps
    tensorboard: bool = False  # event files in the run's folder too
    report: bool = False  # `python -m lockstep.report` at the end of a complete run


_AT_LEAST = {
    "batch_size": 1,
    "cpu_threads": 1,
    "load_epoch": 0,
    "momentum": 0,
    "n_classes": 1,
    "n_epochs": 1,
    "n_slots": 2,  # one being filled, one being used
    "print_freq": 1,
    "seed": 0,
    "shuffle_block": 1,
    "snapshot_freq": 1,
    "wait_deadline": 1,
    "weight_decay": 0,
}
_LARGEST = 2**31 - 1

# Keys of theano_alexnet that mean nothing here: accepted, with a line that says why.
OBSOLETE = {
    "lib_conv": "convolutions are PyTorch's (cuDNN or oneDNN)",
    "use_data_layer": "the loaders crop and mirror",
    "file_batch_size": "the files themselves say how many images they hold",
}
_SOCKET = re.compile(r"sock_(data|gpu)\d*")
_GPU = re.compile(r"gpu\d*")
_RUN_NAME = re.compile(r"[\w+-][\w.+-]{0,99}")


@dataclass(frozen=True)
class Layer:
    """Where some keys came from (a file's name or 'command line') and what they are."""

    source: str
    values: Mapping[str, Any]


class _UniqueKeyLoader(yaml.SafeLoader):
    """safe_load, but a key given twice is an error instead of a silent choice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(
                problem=f"key given twice: {', '.join(sorted(twice))}", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> Layer:
    """Reads one YAML file of keys. Raises UserError where it is missing, not YAML or not a mapping."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not a text file in UTF-8") from error
    try:
        values = yaml.load(text, _UniqueKeyLoader)
    except _YAML_ERRORS as error:
        raise UserError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path}: must hold 'key: value' lines")
    return Layer(str(path), values)


def read_command_line(words: list[str]) -> Layer:
    """Turns ['learning_rate=0.02', ...] into a layer; values are read as YAML."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UserError(f"{COMMAND_LINE}: {word!r} is not of the form key=value")
        if key in values:
            raise UserError(f"{COMMAND_LINE}: {key} is given twice")
        try:
            values[key] = yaml.safe_load(text)
        except _YAML_ERRORS as error:
            raise UserError(f"{COMMAND_LINE}: {word!r}: the value can't be read") from error
    return Layer(COMMAND_LINE, values)


def resolve(layers: list[Layer]) -> tuple[Config, list[str]]:
    """Merges the layers (the last wins) into a checked Config, and notices to print about old keys."""
    hints = typing.get_type_hints(Config)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    notices: list[str] = []
    for layer in layers:
        for key, value in _translate(layer, notices).items():
            if key not in hints:
                raise UserError(f"{layer.source}: unknown key '{key}'{_nearest(key, hints)}")
            values[key] = _checked(layer.source, key, value, hints[key])
            sources[key] = layer.source
    config = Config(**values)
    _check_values(config, sources)
    _check_combinations(config, sources)
    return config, notices


def check_devices(config: Config) -> None:
    """Raises UserError for keys that ask for what only GPUs have, where `devices` are CPUs."""
    if "cpu" not in config.devices:
        return
    asked = {"precision": config.precision == "tf32", "cuda_graph": config.cuda_graph}
    asked["exchange"] = config.exchange != "auto"
    for key in (key for key, wanted in asked.items() if wanted):
        raise UserError(
            f"{key}: {getattr(config, key)} is for GPUs only, and this run is on {config.devices[0]}"
        )


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML that `--config` reads back to the same Config."""
    plain = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in dataclasses.asdict(config).items()
    }
    return yaml.safe_dump(plain, sort_keys=False)


def _translate(layer: Layer, notices: list[str]) -> dict[str, Any]:
    """Drops or renames what theano_alexnet's files hold, with one notice a key."""
    kept: dict[str, Any] = {}
    gpus: list[Any] = []
    for key, value in layer.values.items():
        if key in OBSOLETE or _SOCKET.fullmatch(key):
            why = OBSOLETE.get(key, "processes talk over pipes, not ports")
            notices.append(f"{layer.source}: {key} is accepted and not used: {why}")
        elif _GPU.fullmatch(key):
            gpus.append(value)
        elif key == "shuffle" and isinstance(value, bool):
            kept[key] = "batches" if value else "none"
        else:
            kept[key] = value
    if gpus and "devices" not in kept:
        kept["devices"] = gpus
        notices.append(f"{layer.source}: gpu keys are read as 'devices: {gpus}'")
    return kept


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    matches = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def _checked(source: str, key: str, value: Any, hint: Any) -> Any:
    try:
        return convert(value, hint)
    except TypeError:
        raise UserError(f"{source}: {key} must be {describe(hint)}, not {value!r}") from None


def _check_values(config: Config, sources: Mapping[str, str]) -> None:
    """Single values that have the right type and can't work all the same."""
    for key, least in _AT_LEAST.items():
        value = getattr(config, key)
        if isinstance(value, int | float) and not value >= least:
            raise UserError(f"{_where(key, sources)}: {key} must be at least {least}, not {value}")
    for key in config.__dataclass_fields__:
        value = getattr(config, key)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{_where(key, sources)}: {key} must be a finite number, not {value}")
        if type(value) is int and value > _LARGEST:
            raise UserError(f"{_where(key, sources)}: {key} must be at most {_LARGEST}, not {value}")
    if not config.learning_rate > 0:
        raise UserError(
            f"{_where('learning_rate', sources)}: learning_rate must be above 0, not {config.learning_rate}"
        )
    if not config.momentum < 1:
        raise UserError(f"{_where('momentum', sources)}: momentum must be below 1, not {config.momentum}")


def _check_combinations(config: Config, sources: Mapping[str, str]) -> None:
    if config.use_nesterov_momentum and not (config.use_momentum and config.momentum > 0):
        raise UserError(
            f"{_where('use_nesterov_momentum', sources)}: use_nesterov_momentum needs "
            "use_momentum: true and a momentum above 0"
        )
    if list(config.lr_step) != sorted(set(config.lr_step)):
        raise UserError(f"{_where('lr_step', sources)}: lr_step must rise: {list(config.lr_step)}")
    if config.cuda_graph and config.augment_on == "loader":
        raise UserError(
            f"{_where('cuda_graph', sources)}: cuda_graph needs augment_on: trainer, which puts every "
            "minibatch into the same place"
        )
    if not _survives_json(config.model_args):
        raise UserError(
            f"{_where('model_args', sources)}: model_args may hold what JSON can keep, "
            f"with texts as keys: {config.model_args}"
        )
    if config.run_name is not None and not _RUN_NAME.fullmatch(config.run_name):
        raise UserError(
            f"{_where('run_name', sources)}: run_name is a folder's name inside weights_dir, "
            f"up to 100 letters, digits and -_.+ : {config.run_name!r}"
        )


def _survives_json(value: dict[str, Any]) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def _where(key: str, sources: Mapping[str, str]) -> str:
    return sources.get(key, "default")
