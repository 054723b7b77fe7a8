"""Batch normalisation over all trainers' images (`sync_batch_norm`).

Each trainer computes the mean and the squared deviations of its own images and sends them to the others;
the union's are combined after Chan, Golub and LeVeque (1983, "Algorithms for computing the sample variance",
equations 1.3). In the backward pass trainers share the two sums that the gradient needs (Ioffe and Szegedy
2015, arXiv 1502.03167, section 3). All trainers add in rank order, so all have the same bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.exchange.transport import SharedRows, Transport
from lockstep.network.arena import Arena


class Statistics:
    """The exchange of per-channel sums among all trainers.

    Args:
        transport: Connects the arenas of all trainers. Its clock gets the phases of the exchange.
        arena: This trainer's.
        n_channels: Channels of the widest layer.

    Attributes:
        n_bytes: Bytes read from other trainers since the caller last reset it.
        counted: Whether this trainer's values count. False while it has no images and takes part, with a loss
            of 0, so that the others can proceed.
    """

    def __init__(self, transport: Transport, arena: Arena, n_channels: int) -> None:
        self._group, self._clock = transport.group, transport.clock
        self._n_exchanges, self.n_bytes, self.counted = 0, 0, True
        # Two tables alternate: the exchange in between ensures that all ranks have read a row before its
        # owner writes it again.
        columns, dtype, what = 2 * n_channels + 1, arena.flat.dtype, "statistics of batch normalisation"
        self._tables = [SharedRows(transport, arena.memory, columns, dtype, what) for _ in range(2)]

    def all_gather(self, row: torch.Tensor, point: str) -> torch.Tensor:
        """Return all ranks' rows: float64 (rank, column), valid until the exchange after the next.

        Args:
            row: This rank's sums (column,).
            point: Name of the exchange, for errors.

        Raises:
            PeerProblem: A rank did not arrive in time; the message names it.
        """
        table = self._tables[self._n_exchanges % 2]
        self._n_exchanges += 1
        table.exchange(row, lambda _: self._group.barrier(point))
        self._clock("compute")
        self.n_bytes += 8 * len(row) * (self._group.world.size - 1)
        return table.rows(len(row))

    def close(self) -> None:
        """Free this rank's tables, after all ranks have stopped exchanging."""
        for table in self._tables:
            table.close()


class _SyncBatchNorm(_BatchNorm):
    """A layer of torch's batch normalisation with the statistics of all trainers' images.

    Attributes:
        statistics: The exchange with the other trainers.
        layer_name: The layer's name in the network, for errors.
    """

    statistics: Statistics
    layer_name: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        y, n, mean, variance = _Normalise.apply(input, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        if self.running_mean is not None and self.running_var is not None:
            self._move(n, mean, variance)
        assert isinstance(y, torch.Tensor)
        return y

    @torch.no_grad()
    def _move(self, n: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running statistics with the unbiased variance, as torch does."""
        assert self.num_batches_tracked is not None and self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        unbiased = variance * (n / (n - 1).clamp(min=1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


class _SyncBatchNorm1d(_SyncBatchNorm, nn.BatchNorm1d):
    pass


class _SyncBatchNorm2d(_SyncBatchNorm, nn.BatchNorm2d):
    pass


class _SyncBatchNorm3d(_SyncBatchNorm, nn.BatchNorm3d):
    pass


_KINDS: dict[type, type[_SyncBatchNorm]] = {
    nn.BatchNorm1d: _SyncBatchNorm1d,
    nn.BatchNorm2d: _SyncBatchNorm2d,
    nn.BatchNorm3d: _SyncBatchNorm3d,
}


class _Normalise(torch.autograd.Function):
    """Normalisation of x (sample, channel, ...) with the moments of all trainers' values.

    Its outputs are y, the number of values per channel over all trainers, and their mean and variance.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        layer: _SyncBatchNorm,
    ) -> tuple[torch.Tensor, ...]:
        n, mean, variance = _moments_of_all(x, layer)
        dtype = torch.promote_types(torch.float32, x.dtype) if weight is None else weight.dtype
        ctx.layer, ctx.n = layer, n
        ctx.save_for_backward(x, weight, mean.to(dtype), variance.to(dtype))
        y = F.batch_norm(x, mean.to(dtype), variance.to(dtype), weight, bias, False, 0.0, layer.eps)
        ctx.mark_non_differentiable(n, mean, variance)
        return y, n, mean, variance

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *errors: torch.Tensor) -> Any:
        """Return the gradients of x, weight and bias.

        With e the errors and z the normalised x, the gradient of x is w / s (e - mean(e) - z mean(e z)),
        where the means are over all trainers.
        """
        (x, weight, mean, variance), error = ctx.saved_tensors, errors[0]
        dtype = x.dtype
        if dtype.itemsize < mean.dtype.itemsize:  # a large mean error would take the rest with it in rounding
            x, error = x.to(mean.dtype), error.to(mean.dtype)
        scale = torch.ones_like(mean) if weight is None else weight
        # The gradient for moments that do not depend on x; it yields this trainer's sums as well.
        to_x, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
            error, x, scale, mean, variance, None, None, False, ctx.layer.eps, [True, True, True]
        )
        point = f"{ctx.layer.layer_name}: gradients of its statistics"
        rows = ctx.layer.statistics.all_gather(torch.cat([to_bias, to_weight]).double(), point)
        means = rows.sum(0).view(2, -1) / ctx.n
        inverse = (variance.double() + ctx.layer.eps).rsqrt()
        offset, slope = scale * inverse * means[0], scale * inverse.square() * means[1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        offset, slope, centre = (values.to(mean.dtype).view(shape) for values in (offset, slope, mean))
        if ctx.layer.statistics.counted:
            to_x = to_x - (x - centre).mul_(slope).add_(offset)
        to_x = to_x.to(dtype)
        affine = weight is not None
        return to_x, to_weight if affine else None, to_bias if affine else None, None


def _moments_of_all(
    x: torch.Tensor, layer: _SyncBatchNorm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the values per channel in all trainers' x, their mean and variance: (), (channel,), float64."""
    n_channels = x.shape[1]
    row = torch.zeros(2 * n_channels + 1, dtype=torch.float64, device=x.device)
    n_own = x.numel() // n_channels
    if layer.statistics.counted:
        values = x.float() if x.dtype.itemsize < torch.float32.itemsize else x
        variance, mean = torch.var_mean(values, [0, *range(2, x.dim())], correction=0)
        row[0], row[1 : n_channels + 1], row[n_channels + 1 :] = n_own, mean, variance.double() * n_own
    rows = layer.statistics.all_gather(row, f"{layer.layer_name}: statistics")
    counts, means, squares = rows[:, :1], rows[:, 1 : n_channels + 1], rows[:, n_channels + 1 :]
    n = counts.sum()
    mean = (counts * means).sum(0) / n
    return n, mean, (squares + counts * (means - mean).square()).sum(0) / n


def check_shares(model: nn.Module, config: Config, images: torch.Tensor, lengths: Sequence[int]) -> None:
    """Refuse, before the first step, a run in which a layer would normalise a single value per channel.

    Args:
        model: In training mode, and left so.
        images: One image, as the network takes it.
        lengths: Training images of the epochs, or of what is left of one; their last minibatch may be small.

    Raises:
        UserError: Such a layer would get a share of one image. torch would raise a ValueError at that step.
    """
    n_shares = 1 if config.sync_batch_norm else config.logical_ranks or config.n_trainers
    size = config.global_batch_size or config.batch_size * config.n_trainers
    ends = [(min(n, size), n % size) for n in lengths]
    small = [n for both in ends for n in both if 0 < n < 2 * n_shares]  # one image for some
    layers = _lone_valued(model, images) if small else []
    if not layers:
        return
    kind = "logical ranks" if config.logical_ranks else "trainers"
    one = "all trainers" if config.sync_batch_norm else "a trainer"
    takers = f"{n_shares} {kind}" if n_shares > 1 else one
    cure = "Choose another batch_size or global_batch_size, so that no share is a single image"
    if config.logical_ranks is None and config.n_hosts == 1 and min(small) > 1:
        cure += ", or set sync_batch_norm: true, which takes the statistics of all trainers"
    raise UserError(
        f"model {config.model}: its {layers[0]} can't normalise a single image, whose variance is unknown: "
        f"of {lengths[0]} training images a minibatch of {min(small)} is left for {takers}. {cure}."
    )


def _lone_valued(model: nn.Module, images: torch.Tensor) -> list[str]:
    """Return the layers of batch normalisation that have one value per channel of these images."""
    layers: list[str] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, inputs, name=name: layers.append(name) if inputs[0][:, 0].numel() == 1 else None
        )
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and layer.training
    ]
    model.eval()
    model.training = bool(getattr(model, "aux_weights", ()))  # else it would not call its auxiliary heads
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad():
            torch.func.functional_call(model, buffers, (images,))
    finally:
        model.train()
        for hook in hooks:
            hook.remove()
    return layers


def widest(model: nn.Module) -> int:
    """Return the channels of the widest layer of batch normalisation.

    Raises:
        UserError: There is no such layer, or one that cannot take the statistics of all trainers.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    for name, layer in layers.items():
        if type(layer) not in _KINDS:
            kind = type(layer)
            raise UserError(
                f"sync_batch_norm: {name} is a {kind.__module__}.{kind.__qualname__}, and only torch's own "
                "BatchNorm1d, 2d and 3d can be given the statistics of all. Set sync_batch_norm: false."
            )
    if not layers:
        raise UserError(
            "sync_batch_norm: this network has no batch normalisation. Set sync_batch_norm: false."
        )
    return max(layer.num_features for layer in layers.values())


def install(model: nn.Module, statistics: Statistics) -> None:
    """Make every layer of batch normalisation use the statistics of all trainers, in place."""
    for name, module in model.named_modules():
        if type(module) in _KINDS:
            module.__class__ = _KINDS[type(module)]
            module.statistics, module.layer_name = statistics, name
