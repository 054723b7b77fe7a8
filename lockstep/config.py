"""The configuration of a run: config.yaml, then the spec, then the command line; the later one wins.

Every key is a field of `Config`. A key that is not, a value of the wrong type, a key given twice in one file
and an impossible combination are each a `UserError` that names the file and the key. `yaml.safe_load` rules
apply: nothing in a YAML file is ever executed.
"""

import dataclasses
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from lockstep.checks import check
from lockstep.errors import UserError, nearest
from lockstep.optim import OptimizerName
from lockstep.optim.schedules import ScheduleName
from lockstep.typed import convert, describe

COMMAND_LINE = "command line"
# PyYAML lets the errors of int(), float() and date() through for tags like !!int x, and recursion for deep
# nesting.
_YAML_ERRORS = (yaml.YAMLError, ValueError, AttributeError, RecursionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Every key that config.yaml, a spec and the command line may hold, with its default."""

    # What to train
    model: str = "smallnet"  # models/<model>.py, torchvision:<name>, timm:<name> or <package.module>:<Class>
    model_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of it
    input_size: int | None = None  # rows and columns; null: the model's
    seed: int = 0

    # Resuming
    resume_train: bool = False
    load_epoch: int | Literal["latest"] = "latest"

    # Starting from weights that were trained elsewhere
    pretrained: str | None = None
    pretrained_epoch: int | Literal["latest"] = "latest"
    pretrained_part: Literal["weights", "whole"] = "weights"
    pretrained_lib_conv: Literal["cudnn", "cudaconvnet"] | None = (
        None  # null: as the folder's config.yaml says
    )
    pretrained_channels: Literal["rgb", "bgr"] = "rgb"
    pretrained_allow: tuple[str, ...] = ()
    finetune: bool = False

    # Learning
    n_epochs: int = 20
    learning_rate: float = 0.01
    label_smoothing: float = 0.0  # share of each label that all classes get, in training
    accumulate: int = 1  # minibatches a step
    optimizer: OptimizerName = "sgd"
    optimizer_args: dict[str, Any] = field(default_factory=dict)  # see lockstep/optim
    clip_norm: float | None = None  # largest norm of a trainer's gradient; null: any
    ema_decay: float | None = None  # of weights' moving averages, which validate then; null: none
    lr_policy: ScheduleName = "step"
    lr_power: float = 1.0  # polynomial
    warm_up_epochs: int = 0
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
    # the mean image, one mean per colour channel, or 3 numbers; null: the model's numbers, else image
    subtract_mean: Literal["image", "channel", "none"] | tuple[float, ...] | None = None
    scale: float | tuple[float, ...] | None = None  # pixels' factor after that; null: the model's, else 1
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


# Keys of theano_alexnet that mean nothing here: accepted, with a line that says why.
OBSOLETE = {
    "lib_conv": "convolutions are PyTorch's (cuDNN or oneDNN)",
    "use_data_layer": "the loaders crop and mirror",
    "file_batch_size": "the files themselves say how many images they hold",
}
_SOCKET = re.compile(r"sock_(data|gpu)\d*")
_GPU = re.compile(r"gpu\d*")


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
                raise UserError(f"{layer.source}: unknown key '{key}'{nearest(key, hints)}")
            values[key] = _checked(layer.source, key, value, hints[key])
            sources[key] = layer.source
    config = Config(**values)
    check(config, sources)
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


def _checked(source: str, key: str, value: Any, hint: Any) -> Any:
    try:
        return convert(value, hint)
    except TypeError:
        raise UserError(f"{source}: {key} must be {describe(hint)}, not {value!r}") from None
