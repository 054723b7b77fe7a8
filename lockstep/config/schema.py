"""Every key of a configuration with its type and default. docs/configuration.md explains each one."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from lockstep.config.augmentation import AutoAugmentName, CropName
from lockstep.config.rules import RuleName
from lockstep.config.tasks import Monitor, Task
from lockstep.optim import OptimizerName
from lockstep.optim.schedules import ScheduleName
from lockstep.threads import MOST_THREADS
from lockstep.typed import Range

Count = Annotated[int, Range(least=1)]
Natural = Annotated[int, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]
Fraction = Annotated[float, Range(above=0, below=1)]
BelowOne = Annotated[float, Range(least=0, below=1)]
Probability = Annotated[float, Range(least=0, most=1)]
Threads = Annotated[int, Range(least=1, most=MOST_THREADS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All keys that config.yaml, a spec and the command line may hold."""

    # Network
    model: str = "smallnet"  # models/<model>.py, torchvision:<name>, timm:<name> or <package.module>:<Class>
    model_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the model
    input_size: tuple[int, ...] | Count | None = None  # rows and columns; null: the model's own size
    seed: Natural = 0

    # Resuming
    resume_train: bool | Literal["auto"] = False  # auto: resume if the run has a checkpoint
    load_epoch: Natural | Literal["latest"] = "latest"

    # Pretrained weights
    pretrained: str | None = None
    pretrained_epoch: Natural | Literal["latest"] = "latest"
    pretrained_part: Literal["weights", "whole"] = "weights"
    # null: what the config.yaml in the weights' folder says
    pretrained_lib_conv: Literal["cudnn", "cudaconvnet"] | None = None
    pretrained_channels: Literal["rgb", "bgr"] = "rgb"
    pretrained_allow: tuple[str, ...] = ()
    new_head: bool = False

    # Fine-tuning
    freeze: tuple[str, ...] = ()  # patterns of parameters that are not trained
    # the first epoch in which they are trained; null: they never are
    unfreeze_epoch: Annotated[int, Range(least=2)] | None = None
    learning_rates: dict[str, Any] = field(default_factory=dict)  # pattern: factor of the learning rate
    layer_decay: Positive | None = None  # factor of the rate from each stage to the one before it; null: 1

    # Learning
    task: Task = "classify"  # or multilabel: an image may have several classes, or none
    n_epochs: Count = 20
    learning_rate: Positive = 0.01
    # share of each training label that is spread over all classes
    label_smoothing: BelowOne = 0.0
    # weights of the loss by class, with mean 1 over the training images; null: all classes count alike;
    # task: multilabel: weights of the images that have a class, beside those that lack it
    class_weights: Literal["balanced"] | tuple[float, ...] | dict[str, Any] | None = None
    loss: str | None = None  # <package.module>:<function>; null: (binary) cross-entropy
    accumulate: Count = 1  # batches per step
    optimizer: OptimizerName = "sgd"
    optimizer_args: dict[str, Any] = field(default_factory=dict)  # see lockstep/optim
    clip_norm: Positive | None = None  # largest norm of a trainer's gradient; null: no clipping
    ema_decay: Fraction | None = None  # decay of the weights' moving average; null: none
    lr_policy: ScheduleName = "step"
    # auto: warm-ups and the policies that are curves by step, the others by epoch
    lr_update: Literal["auto", "step", "epoch"] = "auto"
    lr_power: Positive = 1.0  # exponent of lr_policy: polynomial
    warm_up_epochs: NotNegative = 0.0
    min_lr: NotNegative = 0.0  # the rate never falls below it; curves end at it
    lr_adapt_threshold: float = 0.01  # lr_policy: auto: least fall of the validation error in two epochs
    # lr_policy: step: the rate falls at these shares of the run, or after these whole epochs
    lr_step: tuple[int | float, ...] = (0.55, 0.8)
    lr_gamma: Fraction = 0.1  # lr_policy: step and auto: the factor of a fall
    use_momentum: bool = True
    use_nesterov_momentum: bool = False
    momentum: BelowOne = 0.9
    weight_decay: NotNegative = 0.0005

    # Synchronization
    rule: RuleName = "auto"
    rule_args: dict[str, Any] = field(default_factory=dict)  # see lockstep/config/rules.py
    global_batch_size: Count | None = None  # images of a minibatch of all trainers; null: batch_size each
    sync_batch_norm: bool = False  # batch normalization with the statistics of all trainers' images
    logical_ranks: Count | None = None  # fixed number of parts of a batch; null: one part per trainer
    # logical_ranks: how many each trainer computes; auto: by measured times
    shares: Literal["equal", "auto"] | tuple[int, ...] = "equal"
    factors: bool = False  # rule: gradients: large linear layers exchange factors of their gradients
    overlap: bool = True  # rule: gradients: reduce gradients during the backward pass

    # Validation
    val_freq: Count = 1  # epochs between validations; the last epoch is always validated
    # the value that says which epoch is best; null: error_top1, task: multilabel: mean_average_precision
    monitor: Monitor | None = None
    threshold: Fraction = 0.5  # task: multilabel: probability from which a class counts as predicted
    patience: Count | None = None  # epochs without a better `monitor` after which the run ends; null: never

    # Data
    data_folder: str = "./data/digits"  # a dataset folder, or a folder of images, which is converted
    val_split: Fraction = 0.1  # folders of images: the share to validate on, without validation images
    cache_folder: str | None = None  # of converted images; null: <data_folder>.lockstep
    data: str | None = None  # <package.module>:<function> that makes datasets, instead of data_folder
    item_size: tuple[int, ...] | Count | None = None  # to which the images of `data` are resized
    n_channels: Count | None = None  # of the images, 1 to 4; null: those that they have
    train_folder: str | None = None  # null: <data_folder>/train_hkl
    val_folder: str | None = None  # null: <data_folder>/val_hkl
    label_folder: str | None = None  # null: <data_folder>/labels
    mean_file: str | None = None  # null: <data_folder>/misc/img_mean.npy
    # null: the number in the dataset's manifest; at most, because each has a name, also in files
    n_classes: Annotated[int, Range(least=1, most=10_000_000)] | None = None
    # the mean image, one mean per color channel, or 3 numbers; null: the model's numbers, else image
    subtract_mean: Literal["image", "channel", "none"] | tuple[float, ...] | None = None
    # factor of pixels after that; null: the model's, else 1
    scale: Positive | tuple[Positive, ...] | None = None
    check_sums: bool = False  # compare every file with the manifest's checksum before the start
    rand_crop: bool = True
    rand_mirror: bool = True
    # strength of random shifts of intensity and color (lockstep/data/colours.py)
    rand_color: NotNegative = 0.0
    batch_crop_mirror: bool = False  # one crop and mirror for a whole batch
    crop: CropName | None = None  # of training images; null: random or center, by rand_crop
    crop_args: dict[str, Any] = field(default_factory=dict)  # see lockstep/config/augmentation.py
    rotate: Annotated[float, Range(least=0, most=180)] = 0.0  # largest angle in degrees
    color_jitter: float | tuple[float, ...] = 0.0  # of brightness, contrast, saturation (and hue)
    auto_augment: AutoAugmentName | None = None
    auto_augment_args: dict[str, Any] = field(default_factory=dict)
    augmentation: str | None = None  # a function of the user's, <package.module>:<function>
    random_erasing: Probability = 0.0  # probability
    mixup: NotNegative = 0.0  # alpha; 0: none
    cutmix: NotNegative = 0.0  # alpha; 0: none
    mix_prob: Probability = 1.0  # share of images that are mixed
    mix_off_epoch: Count | None = None  # the first epoch without mixing
    shuffle: Literal["none", "batches", "blocks"] = "blocks"
    shuffle_block: Count = 16  # images in a block of shuffle: blocks
    sampler: Literal["balanced", "sqrt"] | None = None  # shares of the classes in an epoch; null: as they are
    para_load: bool = True
    # per loader; null: up to 4 on GPUs with spare cores, else 1
    read_threads: Threads | None = None
    # batches in a loader's ring: one is filled while another is used
    n_slots: Annotated[int, Range(least=2)] = 3
    read_retries: Natural = 2  # further attempts to read a file after a disk error
    # times that each killed loader is started again alone, each with a pipe that is open from the start;
    # auto: 3 with on_failure: restart, where it can be
    loader_restarts: Annotated[int, Range(least=0, most=100)] | Literal["auto"] = "auto"

    # Devices
    devices: tuple[str, ...] = ()
    batch_size: Count = 32  # per trainer
    # per trainer; null: the cores divided by the number of trainers
    cpu_threads: Threads | None = None
    pin_cores: bool = False  # bind each trainer's threads to its own cores
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"  # of matrix products; weights are always float32
    # auto: all on GPUs with precision: bf16, else plain
    conv_layout: Literal["auto", "plain", "space_to_depth", "dense", "all"] = "auto"
    deterministic: bool = False  # GPUs: the same bits in every run
    compile: bool = False  # run the training pass through torch.compile
    recompute: bool = False  # run the forward pass of each stage again in the backward pass, to save memory
    cuda_graph: bool | Literal["auto"] = "auto"  # GPUs: capture a step once and replay it
    exchange: Literal["auto", "p2p", "staged", "swap"] = "auto"  # GPUs: the transport between trainers
    # GPUs: the process that runs the augmentation kernels; cores: the loader's cores make images
    augment_on: Literal["trainer", "loader", "cores"] = "trainer"
    # GPUs: the process that copies batches to the device; auto: the trainer, unless augment_on: loader
    upload: Literal["auto", "loader", "trainer"] = "auto"
    # GPUs: the operations that use Lockstep's own kernels
    custom_kernels: Literal["all", "none", "lrn", "dropout", "pool", "sgd", "blocks"] = "all"
    # when a process dies or hangs; auto: restart with several trainers, else stop
    on_failure: Literal["auto", "stop", "restart", "shrink"] = "auto"
    max_restarts: Count = 3  # failures without a new step, with on_failure: restart and shrink
    # between checkpoints in memory; auto: 1 % of the time is spent on them, more after failures; null: none
    memory_checkpoint_seconds: Positive | Literal["auto"] | None = "auto"
    preempt_seconds: Positive | None = None  # from SIGTERM until the machine is taken away; null: not known
    check_every: Count | None = 1000  # steps between bitwise comparisons of the replicas; null: never
    recheck_every: Count | None = None  # steps between checks of one logical rank's gradient; null: none
    timeout: Annotated[float, Range(least=1)] = 120.0  # seconds that one process waits for another

    # Several hosts (lockstep/hosts)
    n_hosts: Count = 1  # each has its own launcher and the same number of devices
    host_rank: int | None = None  # this host's number, from 0
    rendezvous: str | None = None  # host 0's ADDRESS:PORT
    host_address: str | None = None  # this host's address; null: the one that reaches the rendezvous
    rejoin_seconds: NotNegative = 0.0  # for which a launcher that died is waited for; 0: the run ends
    network: Literal["auto", "gloo", "nccl"] = "auto"  # backend of all-reduce between hosts
    network_dtype: Literal["float32", "bfloat16"] = "float32"  # rule gradients: numbers between hosts

    # Output
    weights_dir: str = "./runs"
    run_name: str | None = None  # null: <model>-<date>-<time>
    snapshot_freq: Count = 5  # epochs between checkpoints
    checkpoint_minutes: Positive | None = None  # minutes between checkpoints within epochs; null: none
    keep_checkpoints: Count | None = None  # number of newest checkpoints kept beside the best; null: all
    print_train_error: bool = True
    print_freq: Count = 20  # steps between lines of progress
    trace: bool = False  # every process records its spans of work for lockstep.trace
    tensorboard: bool = False  # also write TensorBoard event files
    report: bool | Literal["live"] = False  # write the report when the run is complete; live: during it, too

    @property
    def n_trainers(self) -> int:
        """The number of trainers on all hosts. It is right once `devices` is filled in."""
        return self.n_hosts * len(self.devices)

    def is_short(self, n_steps: int) -> bool:
        """Return whether an epoch of so many steps has a single line of progress, at its end."""
        return 2 * n_steps < 3 * self.print_freq
