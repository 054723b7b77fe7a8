"""The configuration: precedence, errors that name file and key, and theano_alexnet's files."""

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

from lockstep.config import Config, Layer, read_command_line, read_yaml, resolve, to_yaml
from lockstep.config.rules import settle
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


@pytest.mark.parametrize("path", sorted(ROOT.glob("[!.]*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_is_valid(path: Path) -> None:
    assert isinstance(resolve([read_yaml(path)])[0], Config)


def test_config_yaml_explains_every_key() -> None:
    assert set(yaml.safe_load((ROOT / "config.yaml").read_text())) == set(Config.__dataclass_fields__)


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
        ("lr_policy=linear", "'auto' or 'cosine' or 'polynomial', not 'linear'"),
        ("accumulate=0", "accumulate must be at least 1"),
        ("accumulate=2 cuda_graph=true", "cuda_graph captures steps of one minibatch"),
        ("clip_norm=0", "clip_norm must be above 0"),
        ("ema_decay=1", "ema_decay must be below 1"),
        ("label_smoothing=1.0", "label_smoothing must be below 1"),
        ("input_size=0", "input_size must be at least 1"),
        ("scale=0", "scale must be above 0"),
        ("scale=[1, 2]", "scale as a list has 3 numbers"),
        ("scale=[1, 2, .inf]", "scale must be a finite number"),
        ("subtract_mean=[1, 2, 256]", "subtract_mean as a list has 3 numbers from 0 to 255"),
        ("subtract_mean=median", "subtract_mean must be 'image' or 'channel' or 'none' or a list"),
        ("rule=gradient", "rule must be 'auto' or 'weights' or 'gradients'"),
        ("rule=gradient", "or 'gossip', not 'gradient' (did you mean 'gradients'?)"),
        ("rule=momenta", "not 'momenta': take gradients, which is the same step with less work"),
        ("rule=local rule_args={evry: 2}", "local has no evry (did you mean 'every'?)"),
        ("rule_args={every: 2}", "rule_args can't be used: auto has no every (it has none)"),
        ("rule=local rule_args={every: 0}", "every must be at least 1, not 0"),
        ("rule=local rule_args={every: 1.5}", "every must be a whole number, not 1.5"),
        ("rule=outer rule_args={momentum: 1}", "momentum must be from 0 to below 1, not 1.0"),
        ("rule=outer rule_args={learning_rate: 0}", "learning_rate must be a finite number above 0"),
        ("rule=elastic rule_args={alpha: 1}", "alpha must be above 0 and below 1, not 1.0"),
        ("minibatch=0", "minibatch must be at least 1"),
        ("parts=3 minibatch=12", "parts must be a power of two, not 3"),
        ("parts=0 minibatch=12", "parts must be a power of two, not 0"),
        ("parts=4", "parts needs minibatch"),
        ("parts=4 minibatch=12 rule=local", "it goes with rule: gradients only, not local"),
        ("parts=4 minibatch=12 accumulate=2", "set accumulate: 1 and a larger minibatch"),
        ("parts=4 minibatch=12 cuda_graph=true", "can't be captured: set cuda_graph: false"),
        ("sync_batch_norm=true rule=local", "goes with rule: weights or gradients, not with local"),
        ("sync_batch_norm=true parts=2 minibatch=8", "can't be combined with parts"),
        ("sync_batch_norm=true cuda_graph=true", "can't be captured: set cuda_graph: false"),
        ("sync_batch_norm=true exchange=swap", "needs another exchange than swap"),
        ("factors=true", "factors take the place of gradients: set rule: gradients, not auto"),
        ("factors=true rule=local", "set rule: gradients, not local"),
        ("factors=true parts=2 minibatch=8", "factors can't be added in a fixed order"),
        ("factors=true rule=gradients cuda_graph=true", "cuda_graph can't capture factors"),
        ("hosts=0", "hosts must be at least 1"),
        ("wire=int8", "wire is for several hosts: it needs hosts"),
        ("host=0", "host is for several hosts"),
        ("meeting_point=10.0.0.1:29500", "meeting_point is for several hosts"),
        ("network=nccl", "network is for several hosts"),
        ("overlap=1", "overlap must be true or false, not 1"),
        ("exchange=swap rule=gradients", "with rule: weights only, not with rule: gradients"),
        ("exchange=swap parts=2 minibatch=8", "with rule: weights only, not with parts"),
        ("on_loss=shrink", "on_loss shrink needs minibatch"),
        ("save_minutes=0", "save_minutes must be above 0, not 0"),
        ("keep=0", "keep must be at least 1, not 0"),
        ("loader_restarts=1 para_load=false", "loader_restarts needs para_load: true"),
        ("loader_restarts=101", "loader_restarts must be at most 100, not 101"),
        ("read_retries=-1", "read_retries must be at least 0, not -1"),
        ("restarts=0", "restarts must be at least 1"),
        ("resume_train=auto", "resume_train auto needs run_name"),
        ("optimizer=adam", "optimizer must be 'sgd' or 'adamw' or 'lars'"),
        ("optimizer_args={betas: [0.9, 0.99]}", "sgd has no betas (it has: bias_rate)"),
        ("optimizer=adamw optimizer_args={beta: 1}", "adamw has no beta (did you mean 'betas'?)"),
        ("optimizer=adamw optimizer_args={betas: [0.9]}", "betas are two numbers"),
        ("optimizer=lars optimizer_args={trust: x}", "trust must be a number, not 'x'"),
        ("optimizer=adamw use_nesterov_momentum=true", "use_nesterov_momentum is for optimizer: sgd"),
        ("warm_up_epochs=20", "warm_up_epochs must be below n_epochs, 20"),
        ("load_epoch=newest", "load_epoch must be a whole number or 'latest', not 'newest'"),
        ("lr_step=20", "lr_step must be a list, each item a whole number, not 20"),
        ("lr_step=[40,20]", "lr_step must rise"),
        ("momentum=1", "momentum must be below 1"),
        ("momentum=.nan", "momentum must be at least 0"),
        ("learning_rate=.inf", "learning_rate must be a finite number, not inf"),
        ("learning_rate=-0.1", "learning_rate must be above 0"),
        ("n_slots=1", "n_slots must be at least 2"),
        ("run_name=../elsewhere", "run_name is a folder's name"),
        ("use_nesterov_momentum=true use_momentum=false", "use_nesterov_momentum needs use_momentum"),
        ("batch_size=1 batch_size=2", "command line: batch_size is given twice"),
        ("batch_size", "command line: 'batch_size' is not of the form key=value"),
        ("model_args=3", "model_args must be a mapping"),
        ("model_args={a: 2024-01-01}", "model_args may hold what JSON can keep"),
        ("model_args={a: {1: 2}}", "model_args may hold what JSON can keep"),
        ("model_args={a: .nan}", "model_args may hold what JSON can keep"),
        ("run_name=2", "run_name must be text"),
        ("run_name=''", "run_name is a folder's name"),
        ("run_name=2024-13-45", "'run_name=2024-13-45': the value can't be read"),
        ("seed=!!int x", "the value can't be read"),
        ("cpu_threads=10000000000", "cpu_threads must be at most 2147483647"),
        ("weight_decay=.inf", "weight_decay must be a finite number"),
        ("wait_deadline=0.5", "wait_deadline must be at least 1"),
        ("seed=" + "[" * 5000, "the value can't be read"),
    ],
)
def test_errors_name_source_key_and_remedy(words: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve([read_command_line(re.split(r" (?=\w+=)", words))])
    assert message in str(caught.value)
    assert str(caught.value).startswith("command line")


@pytest.mark.parametrize(
    ("words", "n_trainers", "message"),
    [
        ("minibatch=3", 4, "minibatch: 3 pictures are too few for 4 trainers"),
        ("minibatch=12 parts=4", 3, "parts: 3 trainers can't share 4 parts"),
        ("minibatch=12 parts=2", 4, "parts: 4 trainers can't share 2 parts"),
    ],
)
def test_devices_that_cant_share_the_work_are_named(words: str, n_trainers: int, message: str) -> None:
    config, _ = resolve([read_command_line([*words.split(), f"devices=[{', '.join(['cpu'] * n_trainers)}]"])])
    with pytest.raises(UserError, match=message):
        settle(config)


def test_a_minibatch_overrides_batch_size_and_says_so() -> None:
    config, notices = settle(resolve([read_command_line(["minibatch=10", "devices=[cpu, cpu, cpu]"])])[0])
    assert config.batch_size == 4 and "10 pictures a step, at most 4 a trainer" in notices[0]


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


def test_a_number_without_a_point_is_a_number() -> None:
    """YAML 1.1 reads 5e-4 as text."""
    assert resolve([read_command_line(["weight_decay=5e-4"])])[0].weight_decay == 5e-4


@given(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**31 - 1),
            "momentum": st.floats(0, 0.999),
            "lr_step": st.lists(st.integers(0, 1000), unique=True).map(sorted),
            "run_name": st.none() | st.from_regex(r"[a-z_][a-z0-9.+-]{0,20}", fullmatch=True),
            "shuffle": st.sampled_from(["none", "batches", "blocks"]),
            "scale": st.none() | st.floats(0.001, 10) | st.just([0.1, 0.2, 0.3]),
            "subtract_mean": st.sampled_from([None, "image", "channel", "none", [1.0, 2.0, 3.0]]),
            "model_args": st.dictionaries(st.text("abc", min_size=1), st.integers() | st.booleans()),
        }
    )
)
def test_the_saved_configuration_reads_back(values: dict[str, object]) -> None:
    config, _ = resolve([Layer("test", values)])
    assert resolve([Layer("saved", yaml.safe_load(to_yaml(config)))])[0] == config


def test_the_program_exits_with_2_and_one_line() -> None:
    command = [sys.executable, "train.py", "lerning_rate=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "did you mean 'learning_rate'?" in done.stderr
