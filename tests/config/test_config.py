"""The configuration: precedence, errors that name file and key, and theano_alexnet's files."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from limits import limit

from lockstep.config import Config, Layer, read_command_line, read_run, read_yaml, resolve, to_yaml
from lockstep.config.old_keys import RENAMED
from lockstep.config.rules import rule_args_of, settle
from lockstep.errors import UserError

THEANO_ALEXNET = """
resume_train: False
load_epoch: 20
n_epochs: 60
learning_rate: 0.01
lr_policy: step
lr_adapt_threshold: 0.01
lr_step: [20, 40]
use_data_layer: False
rand_crop: True
shuffle: False
para_load: True
batch_crop_mirror: False
use_momentum : True
use_nesterov_momentum: False
momentum: 0.9
weight_decay: 0.0005
label_folder: /scratch/ilsvrc12/labels/
mean_file: /scratch/ilsvrc12/misc/img_mean.npy
weights_dir: ./models/
lib_conv: cudnn
snapshot_freq: 1
print_train_error: True
print_freq: 20
"""
THEANO_SPEC = (
    "gpu0: 'gpu0'\ngpu1: 'gpu1'\nsock_gpu: 5000\nsock_data0: 5001\nsock_data1: 5002\nbatch_size: 128\n"
)


def test_later_layers_win() -> None:
    layers = [Layer("config.yaml", {"batch_size": 1, "seed": 1, "momentum": 0.1})]
    layers += [Layer("spec.yaml", {"batch_size": 2, "seed": 2}), read_command_line(["batch_size=3"])]
    config, notices = resolve(layers)
    assert (config.batch_size, config.seed, config.momentum) == (3, 2, 0.1)
    assert notices == []


OF_OBJECTS = Layer("config.yaml", {"data_folder": "digits", "data": "package:datasets", "item_size": 36})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("n_epochs=3", ("digits", "package:datasets", 36)),
        ("data_folder=images", ("images", None, None)),
        ("train_folder=batches", ("digits", None, None)),
        ("data=null", ("digits", None, None)),
        ("data_folder=images data=package:others", ("images", "package:others", 36)),
    ],
)
def test_a_dataset_folder_of_a_later_layer_replaces_data(words: str, expected: tuple[object, ...]) -> None:
    config, _ = resolve([OF_OBJECTS, read_command_line(words.split())])
    assert (config.data_folder, config.data, config.item_size) == expected


OF_PATHS = Layer(
    "config.yaml", {"train_folder": "a", "val_folder": "b", "label_folder": "c", "mean_file": "d"}
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("n_epochs=3", ("a", "b", "c", "d")),
        ("mean_file=mean.npy", ("a", "b", "c", "mean.npy")),
        ("data_folder=other", (None, None, None, None)),
        ("mean_file=mean.npy data_folder=other", (None, None, None, "mean.npy")),
    ],
)
def test_a_dataset_folder_of_a_later_layer_replaces_paths(words: str, expected: tuple[object, ...]) -> None:
    config, _ = resolve([OF_PATHS, read_command_line(words.split())])
    assert (config.train_folder, config.val_folder, config.label_folder, config.mean_file) == expected


def test_a_path_of_dataset_folders_is_refused_where_data_is_used() -> None:
    message = "command line: mean_file is for dataset folders, not for `data`"
    with pytest.raises(UserError, match=message):
        resolve([OF_OBJECTS, read_command_line(["mean_file=mean.npy"])])


@pytest.mark.parametrize("path", sorted(ROOT.glob("[!.]*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_is_valid(path: Path) -> None:
    assert isinstance(resolve([read_yaml(path)])[0], Config)


def test_files_of_theano_alexnet_are_understood(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(THEANO_ALEXNET)
    (tmp_path / "spec_2gpu.yaml").write_text(THEANO_SPEC)
    config, notices = resolve([read_yaml(tmp_path / "config.yaml"), read_yaml(tmp_path / "spec_2gpu.yaml")])
    assert config.devices == ("gpu0", "gpu1")
    assert (config.shuffle, config.load_epoch, config.batch_size) == ("none", 20, 128)
    for key in ("lib_conv", "use_data_layer", "sock_gpu", "sock_data0", "sock_data1"):
        assert sum(f" {key} " in notice for notice in notices) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lerning_rate=0.1", "command line: unknown key 'lerning_rate' (did you mean 'learning_rate'?)"),
        ("zzz=1", "command line: unknown key 'zzz'"),
        ("n_epochs=many", "n_epochs must be a whole number, not 'many'"),
        ("n_epochs=1.5", "n_epochs must be a whole number, not 1.5"),
        ("n_epochs=true", "n_epochs must be a whole number, not True"),
        ("n_epochs=0", "n_epochs must be at least 1, not 0"),
        ("para_load=1", "para_load must be true or false, not 1"),
        ("lr_policy=linear", "'polynomial' or 'one_cycle', not 'linear'"),
        ("accumulate=0", "accumulate must be at least 1"),
        ("accumulate=2 cuda_graph=true", "cuda_graph captures steps of one batch"),
        ("clip_norm=0", "clip_norm must be above 0"),
        ("ema_decay=1", "ema_decay must be below 1"),
        ("label_smoothing=1.0", "label_smoothing must be below 1"),
        ("input_size=0", "input_size must be at least 1"),
        ("input_size=[32]", "input_size as a list has 2 numbers above 0, rows and columns"),
        ("item_size=[36, 0]", "item_size as a list has 2 numbers above 0"),
        ("item_size=36", "item_size is for datasets of `data`"),
        ("n_channels=5", "n_channels must be 1 to 4"),
        ("data=./mine", "data is not of the form package.module:function"),
        ("scale=0", "scale must be above 0"),
        ("scale=[1, 2]", "scale as a list has 3 numbers"),
        ("scale=[1, 2, .inf]", "scale must be a finite number"),
        ("subtract_mean=[1, 2, 256]", "subtract_mean as a list has 3 numbers from 0 to 255"),
        ("subtract_mean=median", "subtract_mean must be 'image' or 'channel' or 'none' or a list"),
        ("rule=gradient", "rule must be 'auto' or 'weights' or 'gradients'"),
        ("rule=gradient", "or 'gossip', not 'gradient' (did you mean 'gradients'?)"),
        ("rule=local rule_args={evry: 2}", "local has no evry (did you mean 'every'?)"),
        ("rule_args={every: 2}", "rule_args can't be used: auto has no every (it has none)"),
        ("rule=local rule_args={every: 0}", "every must be at least 1, not 0"),
        ("rule=local rule_args={every: 1.5}", "every must be a whole number, not 1.5"),
        ("rule=outer rule_args={momentum: 1}", "momentum must be from 0 to below 1, not 1.0"),
        ("rule=outer rule_args={learning_rate: 0}", "learning_rate must be above 0 and at most 1e30, not 0"),
        ("rule=outer rule_args={learning_rate: 1e39}", "learning_rate must be above 0 and at most 1e30"),
        ("rule=elastic rule_args={alpha: 1}", "alpha must be above 0 and below 1, not 1.0"),
        (
            "rule=elastic rule_args={alpha: 0.4} devices=[cpu,cpu,cpu,cpu]",
            "rule_args can't be used: alpha 0.4 makes 4 trainers and their center diverge: it must be below "
            "2 / (trainers + 1), 0.4",
        ),
        ("global_batch_size=0", "global_batch_size must be at least 1"),
        ("logical_ranks=0 global_batch_size=12", "logical_ranks must be at least 1, not 0"),
        ("recheck_every=5", "recheck_every checks logical ranks: set logical_ranks and global_batch_size"),
        ("recheck_every=0 logical_ranks=4 global_batch_size=12", "recheck_every must be at least 1"),
        ("shares=auto", "shares divides logical ranks: set logical_ranks and global_batch_size"),
        ("shares=[2,1] logical_ranks=4 global_batch_size=12", "add up to 3, not to logical_ranks: 4"),
        ("shares=[4,0] logical_ranks=4 global_batch_size=12", "leaves a trainer without work"),
        ("shares=[] logical_ranks=4 global_batch_size=12", "leaves a trainer without work"),
        ("shares=fair logical_ranks=4 global_batch_size=12", "shares must be 'equal' or 'auto' or a list"),
        ("logical_ranks=4", "logical_ranks needs global_batch_size"),
        ("logical_ranks=4 global_batch_size=12 rule=local", "it goes with rule: gradients only, not local"),
        (
            "logical_ranks=4 global_batch_size=12 accumulate=2",
            "set accumulate: 1 and a larger global_batch_size",
        ),
        ("logical_ranks=4 global_batch_size=12 cuda_graph=true", "can't be captured: set cuda_graph: false"),
        ("sync_batch_norm=true rule=local", "goes with rule: weights or gradients, not with local"),
        ("sync_batch_norm=true logical_ranks=2 global_batch_size=8", "can't be combined with logical_ranks"),
        ("sync_batch_norm=true cuda_graph=true", "can't be captured: set cuda_graph: false"),
        ("sync_batch_norm=true exchange=swap", "needs another exchange than swap"),
        ("factors=true", "factors replace gradients: set rule: gradients, not auto"),
        ("factors=true rule=local", "set rule: gradients, not local"),
        ("factors=true logical_ranks=2 global_batch_size=8", "factors can't be added in a fixed order"),
        ("factors=true rule=gradients cuda_graph=true", "cuda_graph can't capture factors"),
        ("n_hosts=0", "n_hosts must be at least 1"),
        ("network_dtype=bfloat16", "network_dtype is for several hosts: it needs n_hosts"),
        ("host_rank=0", "host_rank is for several hosts"),
        ("rendezvous=10.0.0.1:29500", "rendezvous is for several hosts"),
        ("network=nccl", "network is for several hosts"),
        ("overlap=1", "overlap must be true or false, not 1"),
        ("exchange=swap rule=gradients", "with rule: weights only, not with rule: gradients"),
        (
            "exchange=swap logical_ranks=2 global_batch_size=8",
            "with rule: weights only, not with logical_ranks",
        ),
        ("on_failure=shrink", "on_failure shrink needs global_batch_size"),
        ("checkpoint_minutes=0", "checkpoint_minutes must be above 0, not 0"),
        ("keep_checkpoints=0", "keep_checkpoints must be at least 1, not 0"),
        ("loader_restarts=1 para_load=false", "loader_restarts needs para_load: true"),
        ("loader_restarts=101", "loader_restarts must be at most 100, not 101"),
        ("read_retries=-1", "read_retries must be at least 0, not -1"),
        ("max_restarts=0", "max_restarts must be at least 1"),
        ("resume_train=auto", "resume_train auto needs run_name"),
        ("optimizer=adam", "optimizer must be 'sgd' or 'adamw' or 'lars'"),
        ("optimizer_args={betas: [0.9, 0.99]}", "sgd has no betas (it has: bias_rate)"),
        ("optimizer=adamw optimizer_args={beta: 1}", "adamw has no beta (did you mean 'betas'?)"),
        ("optimizer=adamw optimizer_args={betas: [0.9]}", "betas are two numbers"),
        ("optimizer=lars optimizer_args={trust: x}", "trust must be a number, not 'x'"),
        ("optimizer=adamw use_nesterov_momentum=true", "use_nesterov_momentum is for optimizer: sgd"),
        ("warm_up_epochs=20", "warm_up_epochs must be below n_epochs, 20"),
        ("load_epoch=newest", "load_epoch must be a whole number or 'latest', not 'newest'"),
        ("lr_step=20", "lr_step must be a list, each item a whole number or a number, not 20"),
        ("lr_step=[40,20]", "lr_step must rise"),
        ("lr_step=[0.5, 20]", "lr_step has whole epochs, or shares of the run above 0 and below 1"),
        ("lr_step=[0.5, 1.5]", "lr_step has whole epochs, or shares of the run above 0 and below 1"),
        ("lr_step=[-1, 2]", "lr_step must have epochs of at least 0: [-1, 2]"),
        ("n_classes=2147483647", "n_classes must be at most 10000000, not 2147483647"),
        ("loss=''", "loss is an empty text: give a value, or leave the key out"),
        ("data_folder=''", "data_folder is an empty text"),
        ("pretrained=''", "pretrained is an empty text"),
        ("lr_gamma=1", "lr_gamma must be below 1"),
        ("freeze=conv1", "freeze must be a list, each item text (in quotes), not 'conv1'"),
        (
            "freeze=[a] rule=gossip",
            "freeze goes with rule: weights, gradients or local, not with rule: gossip",
        ),
        (
            "freeze=[a] exchange=swap",
            "freeze goes with rule: weights, gradients or local, not with exchange: swap",
        ),
        ("learning_rates={a: -1}", "learning_rates must have finite factors of at least 0: a: -1"),
        ("learning_rates={a: fast}", "learning_rates must have finite factors of at least 0: a: 'fast'"),
        ("layer_decay=0", "layer_decay must be above 0"),
        ("layer_decay=1.5", "layer_decay must be at most 1, not 1.5"),
        ("unfreeze_epoch=3", "unfreeze_epoch ends the freezing of parameters: name them with freeze"),
        ("freeze=[a] unfreeze_epoch=21", "unfreeze_epoch 21 is after the last epoch, n_epochs: 20"),
        ("freeze=[a] unfreeze_epoch=1", "unfreeze_epoch must be at least 2, not 1"),
        (
            "freeze=[a] unfreeze_epoch=2 factors=true rule=gradients",
            "unfreeze_epoch can't be combined with factors",
        ),
        ("task=multi", "task must be 'classify' or 'multilabel', not 'multi'"),
        ("task=multilabel sampler=sqrt", "sampler draws by the class of an image, and with task: multilabel"),
        (
            "task=multilabel monitor=balanced_accuracy",
            "monitor must be mean_average_precision or loss or macro_f1 or micro_f1 with task: multilabel",
        ),
        ("monitor=micro_f1", "monitor must be error_top1 or loss or macro_f1 or balanced_accuracy with task"),
        ("threshold=0.3", "threshold is for task: multilabel"),
        ("task=multilabel loss=a:b class_weights=balanced", "class_weights weigh binary cross-entropy with"),
        ("task=multilabel threshold=1", "threshold must be below 1"),
        ("class_weights=[1, -1]", "class_weights must be finite numbers of at least 0: -1.0"),
        ("class_weights={cat: .inf}", "class_weights must be finite numbers of at least 0: inf"),
        ("class_weights={cat: [1]}", "class_weights must be finite numbers of at least 0: [1]"),
        ("class_weights={yes: 2}", "a mapping (text: value) or null, not {True: 2}"),
        ("class_weights=balance", "not 'balance' (did you mean 'balanced'?)"),
        ("sampler=sqrt shuffle=none", "sampler draws single images in random order: set shuffle: blocks"),
        ("loss=mine", "loss is <package.module>:<function>, not 'mine'"),
        ("loss=mine:focal label_smoothing=0.1", "label_smoothing is for cross-entropy"),
        (
            "monitor=error_top5",
            "monitor must be 'error_top1' or 'loss' or 'macro_f1' or 'balanced_accuracy' or 'micro_f1' or",
        ),
        ("patience=0", "patience must be at least 1"),
        ("val_freq=0", "val_freq must be at least 1"),
        ("val_freq=2 lr_policy=auto", "val_freq must be 1 with lr_policy: auto"),
        ("lr_gamma=0", "lr_gamma must be above 0"),
        ("min_lr=-1", "min_lr must be at least 0"),
        ("min_lr=0.1", "min_lr must be at most learning_rate, 0.01: 0.1"),
        (
            "lr_update=steps",
            "lr_update must be 'auto' or 'step' or 'epoch', not 'steps' (did you mean 'step'?)",
        ),
        ("recompute=true compile=true", "recompute can't be combined with compile"),
        ("recompute=true sync_batch_norm=true", "recompute can't be combined with sync_batch_norm"),
        ("recompute=true cuda_graph=true", "recompute can't be captured: set cuda_graph: false"),
        ("momentum=1", "momentum must be below 1"),
        ("momentum=.nan", "momentum must be at least 0"),
        ("learning_rate=.inf", "learning_rate must be a finite number, not inf"),
        ("learning_rate=-0.1", "learning_rate must be above 0"),
        ("n_slots=1", "n_slots must be at least 2"),
        ("run_name=../elsewhere", "run_name is a folder's name"),
        ("use_nesterov_momentum=true use_momentum=false", "use_nesterov_momentum needs use_momentum"),
        ("--learning_rate=0.1", "unknown option --learning_rate (did you mean 'learning_rate=0.1', without"),
        ("on_loss=restart", "command line: on_loss is now on_failure"),
        ("minibatch=64", "command line: minibatch is now global_batch_size"),
        ("--on_loss=restart", "(write 'on_failure=restart', without dashes)"),
        ("--wait-deadline=3", "wait_deadline is now timeout (write 'timeout=3', without dashes)"),
        ("--lr", "unknown option --lr (did you mean 'learning_rate=...', without dashes?)"),
        ("lr=0.1", "unknown key 'lr' (did you mean 'learning_rate'?)"),
        ("epochs=3", "unknown key 'epochs' (did you mean 'n_epochs'?)"),
        ("batch_size", "command line: 'batch_size' is not of the form key=value"),
        ("model_args=3", "model_args must be a mapping"),
        ("model_args={a: 2024-01-01}", "model_args must hold values that JSON can store"),
        ("model_args={a: {1: 2}}", "model_args must hold values that JSON can store"),
        ("model_args={a: .nan}", "model_args must hold values that JSON can store"),
        ("run_name=[2]", "run_name must be text"),
        ("run_name=''", "run_name is an empty text"),
        ("learning_rate=2024-13-45", "'learning_rate=2024-13-45': the value can't be read"),
        ("seed=!!int x", "the value can't be read"),
        ("batch_size=10000000000", "batch_size must be at most 2147483647"),
        ("cpu_threads=100000", "cpu_threads must be at most 1024, not 100000"),
        ("read_threads=100000", "read_threads must be at most 1024, not 100000"),
        ("weight_decay=.inf", "weight_decay must be a finite number"),
        ("timeout=0.5", "timeout must be at least 1"),
        ("seed=" + "[" * 5000, "the value can't be read"),
    ],
)
def test_errors_name_source_key_and_remedy(words: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve([read_command_line(re.split(r" (?=\w+=)", words))])
    assert message in str(caught.value)
    assert str(caught.value).startswith("command line")


def test_a_folder_among_the_keys_is_refused_with_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    with pytest.raises(UserError, match=r"'images' is not of the form key=value\. Write data_folder=images$"):
        read_command_line(["n_epochs=1", "images"])


@pytest.mark.parametrize("text", ["12345", "2026-11-28", "2024-13-45", "1e3", "true", "07"])
def test_a_key_of_texts_takes_a_number_or_date_of_the_command_line_as_it_is(text: str) -> None:
    """A file's YAML has quotes for that; those of a command line are the shell's."""
    config, _ = resolve([read_command_line([f"run_name={text}", "cache_folder=null"])])
    assert config.run_name == text and config.cache_folder is None


@pytest.mark.parametrize("text", ["data/set #2", "&a b", "--- a", "a\tb", "'data/set' #2"])
def test_a_path_of_the_command_line_is_not_cut_as_yaml_would_cut_it(text: str) -> None:
    """A run took data/set in the place of 'data/set #2'. Quotes are YAML's, as in a file."""
    config, _ = resolve([read_command_line([f"data_folder={text}"])])
    assert config.data_folder == (text if text[0] != "'" else "data/set")


def test_of_a_key_given_twice_the_last_one_counts_with_a_note() -> None:
    config, notices = resolve([read_command_line(["batch_size=1", "seed=3", "batch_size=2"])])
    assert config.batch_size == 2 and config.seed == 3
    assert notices == ["command line: batch_size is given twice: the last one counts, batch_size=2"]


def test_an_option_of_other_programs_is_refused_with_the_key_to_write() -> None:
    for words, meant in (
        (["--learning_rate=0.1"], "learning_rate=0.1"),
        (["--lr", "0.1"], "learning_rate=..."),
    ):
        result = subprocess.run(
            [sys.executable, "train.py", "n_epochs=1", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=limit(30),
        )
        assert result.returncode == 2 and f"did you mean '{meant}', without dashes" in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "n_trainers", "message"),
    [
        ("global_batch_size=3", 4, "global_batch_size: 3 images are too few for 4 trainers"),
        ("global_batch_size=12 logical_ranks=4 shares=[3,1]", 3, "are for 2 trainers, and the run has 3"),
        ("global_batch_size=12 logical_ranks=2", 4, "logical_ranks: 4 trainers can't share 2"),
    ],
)
def test_devices_that_cant_share_the_work_are_named(words: str, n_trainers: int, message: str) -> None:
    config, _ = resolve([read_command_line([*words.split(), f"devices=[{', '.join(['cpu'] * n_trainers)}]"])])
    with pytest.raises(UserError, match=message):
        settle(config)


def test_a_minibatch_overrides_batch_size_and_says_so() -> None:
    config, notices = settle(
        resolve([read_command_line(["global_batch_size=10", "devices=[cpu, cpu, cpu]"])])[0]
    )
    assert config.batch_size == 4 and "10 images per step, at most 4 per trainer" in notices[0]


def test_the_message_of_a_global_batch_counts_the_images_of_an_accumulated_step() -> None:
    words = ["global_batch_size=10", "accumulate=3", "devices=[cpu, cpu]"]
    _, notices = settle(resolve([read_command_line(words)])[0])
    assert "10 images per minibatch, at most 5 per trainer; a step has 30 by accumulate" in notices[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2", "key given twice: seed"),
        ("- a\n- b", "must hold 'key: value' lines"),
        ("seed: [1", "is not valid YAML"),
        ("seed: !!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("sede: 1", "unknown key 'sede' (did you mean 'seed'?)"),
    ],
)
def test_errors_in_files_name_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        resolve([read_yaml(path)])
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


@pytest.mark.parametrize("former", sorted(RENAMED))
def test_a_key_under_its_former_name_is_refused_with_the_new_name(tmp_path: Path, former: str) -> None:
    """In config.yaml, in a spec, and on the command line with and without dashes; each in one line."""
    path = tmp_path / "mine.yaml"
    path.write_text(f"{former}: 1\n")
    refusal = f"{former} is now {RENAMED[former]}"
    for read in (
        lambda: resolve([read_yaml(path)]),
        lambda: resolve([read_yaml(ROOT / "config.yaml"), read_yaml(path)]),
        lambda: resolve([read_command_line([f"{former}=1"])]),
        lambda: resolve([read_command_line([f"--{former}=1"])]),
        lambda: resolve([read_command_line([f"--{former}", "1"])]),
    ):
        with pytest.raises(UserError) as caught:
            read()
        assert refusal in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("arguments", [["on_loss=restart"], ["--on_loss=restart"], ["--spec", "old.yaml"]])
def test_the_program_refuses_a_former_name_in_one_line(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "old.yaml").write_text("on_loss: restart\n")
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "config.yaml"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 2 and "on_loss is now on_failure" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_number_without_a_point_is_a_number() -> None:
    """YAML 1.1 reads 5e-4 as text."""
    assert resolve([read_command_line(["weight_decay=5e-4"])])[0].weight_decay == 5e-4


@given(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**31 - 1),
            "momentum": st.floats(0, 0.999),
            "lr_step": st.lists(st.integers(0, 1000), unique=True).map(sorted),
            "run_name": st.none() | st.from_regex(r"([a-z_]|[0-9]+e[0-9])[a-z0-9.+-]{0,20}", fullmatch=True),
            "shuffle": st.sampled_from(["none", "batches", "blocks"]),
            "scale": st.none() | st.floats(0.001, 10) | st.just([0.1, 0.2, 0.3]),
            "subtract_mean": st.sampled_from([None, "image", "channel", "none", [1.0, 2.0, 3.0]]),
            "model_args": st.dictionaries(
                st.text("abc", min_size=1),
                st.integers() | st.booleans() | st.floats(allow_nan=False) | st.text("1e.+-"),
            ),
        }
    )
)
def test_the_saved_configuration_reads_back(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, object]
) -> None:
    config, _ = resolve([Layer("test", values)])
    saved = tmp_path_factory.getbasetemp() / "saved.yaml"
    saved.write_text(to_yaml(config))
    assert resolve([read_yaml(saved)])[0] == config
    assert resolve([Layer("by PyYAML", yaml.safe_load(to_yaml(config)))])[0] == config


@pytest.mark.parametrize("text", ["1e-1", "+1e-01", "1.e-1", "0.001E2", "10e-2"])
def test_numbers_need_no_point_before_an_exponent(text: str) -> None:
    words = [f"model_args={{dropout: {text}}}", f"learning_rates={{fc.*: {text}}}", f"run_name={text}"]
    config, _ = resolve([read_command_line(words)])
    assert config.model_args == {"dropout": 0.1} and config.learning_rates == {"fc.*": 0.1}
    assert config.run_name == text


def test_the_program_exits_with_2_and_one_line() -> None:
    command = [sys.executable, "train.py", "lerning_rate=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "did you mean 'learning_rate'?" in done.stderr


def test_what_draws_replicas_to_a_centre_is_stable_for_any_number_of_trainers() -> None:
    """alpha (trainers + 1) of 2 and more diverges: 0.9 on four trainers came to a loss of 1e22."""
    rule = Layer("test", {"rule": "elastic"})
    for n_trainers, expected in ((1, 0.1), (4, 0.1), (9, 0.1), (18, 0.05), (100, 0.009)):
        config, _ = resolve([rule, Layer("test", {"devices": ["cpu"] * n_trainers})])
        assert rule_args_of(config)["alpha"] == pytest.approx(expected)
    unsettled, _ = resolve([rule, Layer("test", {"rule_args": {"alpha": 0.9}})])  # the number is unknown
    with pytest.raises(UserError, match=r"rule_args can't be used: alpha 0.9 makes 4 trainers"):
        settle(dataclasses.replace(unsettled, devices=("cpu",) * 4))


@pytest.mark.parametrize("content", ["", "# learning_rate: 0.5\n", "{}"])
def test_a_runs_configuration_without_keys_is_refused(tmp_path: Path, content: str) -> None:
    """A run that resumes would otherwise train with the defaults."""
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config\.yaml: holds no keys, so the run's settings are not known"):
        read_run(tmp_path / "config.yaml")
