"""Former names of keys, keys of theano_alexnet, and names of keys in other programs, for suggestions."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.errors import nearest_of

# Keys of theano_alexnet that have no effect, each with the reason to print.
OBSOLETE = {
    "lib_conv": "convolutions are PyTorch's (cuDNN or oneDNN)",
    "use_data_layer": "the loaders crop and mirror",
    "file_batch_size": "the files themselves say how many images they hold",
}
# Names of keys in other programs that are too different to be found by their letters.
_ELSEWHERE = {
    "amp": "precision",
    "arch": "model",
    "batch": "batch_size",
    "bs": "batch_size",
    "checkpoint": "pretrained",
    "device": "devices",
    "dropout": "model_args",
    "epochs": "n_epochs",
    "epoch": "n_epochs",
    "lr": "learning_rate",
    "max_epochs": "n_epochs",
    "name": "run_name",
    "nesterov": "use_nesterov_momentum",
    "num_classes": "n_classes",
    "num_epochs": "n_epochs",
    "num_workers": "read_threads",
    "out": "weights_dir",
    "resume": "resume_train",
    "scheduler": "lr_policy",
    "size": "input_size",
    "wd": "weight_decay",
}
# Keys of version 0.1 and their present names. Run folders and checkpoints of 0.1 hold the former names.
RENAMED = {
    "address": "host_address",
    "conv_forms": "conv_layout",
    "finetune": "new_head",
    "host": "host_rank",
    "hosts": "n_hosts",
    "keep": "keep_checkpoints",
    "kernels": "custom_kernels",
    "meeting_point": "rendezvous",
    "minibatch": "global_batch_size",
    "on_loss": "on_failure",
    "parts": "logical_ranks",
    "restarts": "max_restarts",
    "save_minutes": "checkpoint_minutes",
    "wait_deadline": "timeout",
    "wire": "network_dtype",
}
_SOCKET = re.compile(r"sock_(data|gpu)\d*")
_GPU = re.compile(r"gpu\d*")


def with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values of a run of version 0.1 under the keys' present names.

    Such a run keeps its learning rates, which changed between epochs only.
    """
    return {"lr_update": "epoch", **{RENAMED.get(key, key): value for key, value in values.items()}}


def translate(source: str, values: Mapping[str, Any], notices: list[str]) -> dict[str, Any]:
    """Return a layer's keys without those that only theano_alexnet has.

    Args:
        source: The layer's file, for messages.
        values: The layer's keys.
        notices: Gets one message for each key that is dropped or read as another key.
    """
    translated: dict[str, Any] = {}
    gpus: list[Any] = []
    for key, value in values.items():
        if key in OBSOLETE or _SOCKET.fullmatch(key):
            why = OBSOLETE.get(key, "processes communicate over pipes, not ports")
            notices.append(f"{source}: {key} is accepted and not used: {why}")
        elif _GPU.fullmatch(key):
            gpus.append(value)
        elif key == "shuffle" and isinstance(value, bool):
            translated[key] = "batches" if value else "none"
        else:
            translated[key] = value
    if gpus and "devices" not in translated:
        translated["devices"] = gpus
        notices.append(f"{source}: gpu keys are read as 'devices: {gpus}'")
    return translated


def suggestion(key: str, known: Iterable[str]) -> str:
    """Return the key that an unknown one probably means, or ''."""
    return _ELSEWHERE.get(key.lower()) or nearest_of(key, known)


def did_you_mean(key: str, known: Iterable[str]) -> str:
    """Return ' (did you mean ...?)', or '' if no key is similar."""
    meant = suggestion(key, known)
    return f" (did you mean '{meant}'?)" if meant else ""
