"""Every key of a configuration, its type and its default."""

from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.config.rules import RuleName
from lockstep.optim import OptimizerName
from lockstep.optim.schedules import ScheduleName


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Every key that config.yaml, a spec and the command line may hold, with its default."""

    # What to train
    model: str = "smallnet"  # models/<model>.py, torchvision:<name>, timm:<name> or <package.module>:<Class>
    model_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of it
    input_size: int | None = None  # rows and columns; null: the model's
    seed: int = 0

    # Resuming
    resume_train: bool | Literal["auto"] = False  # auto: where the run has a checkpoint
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

    # How trainers stay one
    rule: RuleName = "auto"
    rule_args: dict[str, Any] = field(default_factory=dict)  # see lockstep/config/rules.py
    minibatch: int | None = None  # pictures a step of all trainers; null: batch_size times their number
    sync_batch_norm: bool = False  # batch normalisation by the statistics of all trainers' pictures
    parts: int | None = None  # of a minibatch, with gradients added in a fixed order; null: one a trainer
    factors: bool = False  # rule gradients: large layers exchange factors of gradients
    overlap: bool = True  # rule gradients: gradients are summed while others are computed

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
    rand_color: float = 0.0  # strength of random shifts of intensity and colour (lockstep/data/colours.py)
    batch_crop_mirror: bool = False  # one crop and mirror for a whole minibatch
    shuffle: Literal["none", "batches", "blocks"] = "blocks"
    shuffle_block: int = 16  # rows (images) in a block of `shuffle: blocks`
    para_load: bool = True
    read_threads: int = 1  # of a loader
    n_slots: int = 3  # minibatches in a loader's ring
    read_retries: int = 2  # times that a file is read again after an error of the disk
    loader_restarts: int = 0  # times that each loader is started again when it was killed

    # Where to train
    devices: tuple[str, ...] = ()
    batch_size: int = 32  # per trainer
    cpu_threads: int | None = None  # null: the cores, divided among the trainers
    pin_cores: bool = False  # each trainer's threads stay on cores of its own
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"  # of products; weights are float32 always
    # in which convolutions are computed, with the same weights
    conv_forms: Literal["plain", "space_to_depth", "dense", "all"] = "plain"
    deterministic: bool = False  # GPUs: the same bits in every run
    compile: bool = False  # the training pass by torch.compile
    cuda_graph: bool | Literal["auto"] = "auto"  # GPUs: a step is captured once and replayed
    exchange: Literal["auto", "p2p", "staged", "swap"] = "auto"  # GPUs
    augment_on: Literal["trainer", "loader"] = "trainer"  # GPUs: which process runs the kernel
    # GPUs: who copies minibatches there: the loader by CUDA IPC, or the trainer; auto: the loader
    upload: Literal["auto", "loader", "trainer"] = "auto"
    kernels: Literal["all", "none", "lrn", "dropout", "pool", "sgd", "blocks"] = (
        "all"  # GPUs: what is computed by kernels of ours
    )
    on_loss: Literal["stop", "restart", "shrink"] = "stop"  # when a process is killed or hangs
    restarts: int = 3  # at most, of on_loss: restart or shrink
    check_every: int | None = 1000  # steps between comparisons of replicas, bit for bit
    wait_deadline: float = 120.0  # seconds that one process waits for another

    # Over which hosts (lockstep/hosts)
    hosts: int = 1  # that train together, each with a launcher of its own and as many devices
    host: int | None = None  # the number of this one, from 0
    meeting_point: str | None = None  # host 0's address:port
    address: str | None = None  # of this host, where others reach it; null: that which reaches meeting_point
    network: Literal["auto", "gloo", "nccl"] = "auto"  # what carries sums between hosts
    wire: Literal["float32", "bfloat16", "int8"] = "float32"  # rule gradients: numbers between hosts

    # Output
    weights_dir: str = "./runs"
    run_name: str | None = None  # null: <model>-<date>-<time>
    snapshot_freq: int = 5  # epochs
    save_minutes: float | None = None  # between checkpoints within epochs; null: only by epochs
    keep: int | None = None  # last checkpoints that stay, and the best; null: all
    print_train_error: bool = True
    print_freq: int = 20  # steps
    trace: bool = False  # every process writes down what it does and when, for lockstep.trace
    tensorboard: bool = False  # event files in the run's folder too
    report: bool = False  # `python -m lockstep.report` at the end of a complete run

    @property
    def n_trainers(self) -> int:
        """Of all hosts, once the devices are settled."""
        return self.hosts * len(self.devices)
