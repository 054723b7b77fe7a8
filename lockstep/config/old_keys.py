"""Keys of theano_alexnet: those that have another name here, and those that mean nothing here."""

import re
from collections.abc import Mapping
from typing import Any

# Keys of theano_alexnet that mean nothing here: accepted, with a line that says why.
OBSOLETE = {
    "lib_conv": "convolutions are PyTorch's (cuDNN or oneDNN)",
    "use_data_layer": "the loaders crop and mirror",
    "file_batch_size": "the files themselves say how many images they hold",
}
_SOCKET = re.compile(r"sock_(data|gpu)\d*")
_GPU = re.compile(r"gpu\d*")


def translate(source: str, values: Mapping[str, Any], notices: list[str]) -> dict[str, Any]:
    """Drops or renames what theano_alexnet's files hold, with one notice a key."""
    kept: dict[str, Any] = {}
    gpus: list[Any] = []
    for key, value in values.items():
        if key in OBSOLETE or _SOCKET.fullmatch(key):
            why = OBSOLETE.get(key, "processes talk over pipes, not ports")
            notices.append(f"{source}: {key} is accepted and not used: {why}")
        elif _GPU.fullmatch(key):
            gpus.append(value)
        elif key == "shuffle" and isinstance(value, bool):
            kept[key] = "batches" if value else "none"
        else:
            kept[key] = value
    if gpus and "devices" not in kept:
        kept["devices"] = gpus
        notices.append(f"{source}: gpu keys are read as 'devices: {gpus}'")
    return kept
