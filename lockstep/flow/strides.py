"""The strides of results before operations run, where torch predicts others than its kernels give.

They differ on CPUs if operands have different strides, such as a gradient that is contiguous beside images in
channels_last. A sum of a result with other strides would round in another way.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.backends.devices import on_gpus
from lockstep.flow import private

# The first result has the memory format of the tensor at this position.
_IN_FORMAT_OF = {
    "aten::_native_batch_norm_legit": 0,
    "aten::channel_shuffle": 0,
    "aten::max_unpool2d": 0,
    "aten::native_batch_norm": 0,
    "aten::native_batch_norm_backward": 1,
    "aten::native_group_norm": 0,  # of torch 2.14
    "aten::native_group_norm_backward": 1,
    "aten::reflection_pad2d": 0,  # of torch 2.11
    "aten::reflection_pad2d_backward": 1,
    "aten::reflection_pad3d": 0,
    "aten::reflection_pad3d_backward": 1,
    "aten::replication_pad2d": 0,  # of torch 2.11
    "aten::replication_pad2d_backward": 1,
    "aten::replication_pad3d": 0,
    "aten::replication_pad3d_backward": 1,
}
_CONTIGUOUS = {
    "aten::_log_softmax_backward_data",
    "aten::_weight_norm_interface",
    "aten::glu_backward",
    "aten::log_sigmoid_forward",
    "aten::native_layer_norm_backward",
    "aten::nll_loss2d_forward",
}
_FIRST_TWO = (
    *("copysign", "div", "elu_backward", "floor_divide", "hardsigmoid_backward", "hardswish_backward"),
    *("hardtanh_backward", "heaviside", "logaddexp", "logical_and", "logical_or", "logical_xor"),
    *("logit_backward", "native_dropout_backward", "softplus_backward", "special_xlog1py", "xlogy"),
)
# The result has the strides of a sum of the tensors at these positions.
_LIKE_SUMS = {f"aten::{name}": (0, 1) for name in _FIRST_TWO} | {
    "aten::binary_cross_entropy_backward": (1, 1),
    "aten::soft_margin_loss_backward": (2, 1),
}


def strides_of(
    function: Any, layouts: Sequence[Any], predicted: torch.Tensor, number: int
) -> tuple[int, ...]:
    """Return the strides of result number `number` of an operation.

    Args:
        layouts: (size, stride, dtype, device) of each tensor that it gets.
        predicted: The result that torch predicts, without values.
    """
    name = private.schema_name(function)
    place = _IN_FORMAT_OF.get(name) if number == 0 else None
    pair = _LIKE_SUMS.get(name) if len(layouts) > 1 else None
    is_contiguous = name in _CONTIGUOUS or function is torch.ops.aten.pow.Scalar
    if (place is None and pair is None and not is_contiguous) or on_gpus([layouts[0][3]]):
        return predicted.stride()
    with private.without_modes():
        given = [torch.empty_strided(size, stride, device="meta") for size, stride, *_ in layouts]
        if pair is not None:
            return torch.add(given[pair[0]], given[pair[1]]).stride()
        own = torch.contiguous_format if place is None else private.memory_format_of(given[place])
        return torch.empty(predicted.size(), memory_format=own, device="meta").stride()
