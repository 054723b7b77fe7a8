"""Batch normalisation over all trainers' pictures: `sync_batch_norm`.

Each trainer has the mean and the squared deviations of its own share, and all show each other theirs; their
union's are put together as Chan, Golub and LeVeque do (1983, "Algorithms for computing the sample variance",
equations 1.3). On the way back they show each other the two sums of which the gradient is made (Ioffe and
Szegedy 2015, arXiv 1502.03167, section 3). All add up in rank order, so that all have the same bits.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.comm.group import Group
from lockstep.errors import UserError
from lockstep.exchange.transport import Transport
from lockstep.memory import Memory
from lockstep.network.shared_rows import SharedRows


class Statistics:
    """The exchange of sums by channel. n_channels: of the widest layer. dtype: of the transport's arenas.

    clock: told of the phases 'meet' and 'exchange', and of 'compute' when a layer goes on. n_bytes: that went
    out of others' memory into this trainer's since it was last set. counted: whether this trainer's values
    are; False where it has none, and takes part for the others' sake, with a loss of 0.
    """

    def __init__(
        self,
        transport: Transport,
        memory: Memory,
        n_channels: int,
        dtype: torch.dtype,
        clock: Callable[[str], None],
    ) -> None:
        self._group: Group = transport.group
        self._clock, self._n_exchanges, self.n_bytes, self.counted = clock, 0, 0, True
        # Two in turn: whoever writes a row again has met those who read it, in the exchange between.
        arguments = transport, memory, 2 * n_channels + 1, dtype, "statistics of batch normalisation"
        self._tables = SharedRows(*arguments), SharedRows(*arguments)
        for table in self._tables:
            table.use_clock(clock)

    def of_all(self, row: torch.Tensor, point: str) -> torch.Tensor:
        """(rank, column) of everyone's row (column,), float64; valid until the exchange after the next.

        point: for errors. Raises PeerProblem naming who has not come.
        """
        table = self._tables[self._n_exchanges % 2]
        self._n_exchanges += 1
        table.exchange(row, lambda _: self._group.barrier(point))
        self._clock("compute")
        self.n_bytes += 8 * len(row) * (self._group.world.size - 1)
        return table.rows(len(row))

    def close(self) -> None:
        for table in self._tables:
            table.close()


class _OverAll(_BatchNorm):
    """What the layers below have beside their dimensions. place: the layer's name in the network."""

    statistics: Statistics
    place: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        y, n, mean, variance = _Normalise.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        if self.running_mean is not None and self.running_var is not None:
            self._move(n, mean, variance)
        assert isinstance(y, torch.Tensor)
        return y

    @torch.no_grad()
    def _move(self, n: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """The running statistics, by the unbiased variance, as torch does."""
        assert self.num_batches_tracked is not None and self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        unbiased = variance * (n / (n - 1).clamp(min=1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


class _OverAll1d(_OverAll, nn.BatchNorm1d):
    pass


class _OverAll2d(_OverAll, nn.BatchNorm2d):
    pass


class _OverAll3d(_OverAll, nn.BatchNorm3d):
    pass


_KINDS: dict[type, type[_OverAll]] = {
    nn.BatchNorm1d: _OverAll1d,
    nn.BatchNorm2d: _OverAll2d,
    nn.BatchNorm3d: _OverAll3d,
}


class _Normalise(torch.autograd.Function):
    """x (sample, channel, ...) to y like it; with how many values a channel had in all, and their moments."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, layer: _OverAll
    ) -> tuple[torch.Tensor, ...]:
        n, mean, variance = _moments_of_all(x, layer)
        dtype = x.dtype if weight is None else weight.dtype
        ctx.layer, ctx.n = layer, n
        ctx.save_for_backward(x, weight, mean.to(dtype), variance.to(dtype))
        y = F.batch_norm(x, mean.to(dtype), variance.to(dtype), weight, bias, False, 0.0, layer.eps)
        ctx.mark_non_differentiable(n, mean, variance)
        return y, n, mean, variance

    @staticmethod
    def backward(ctx: Any, *errors: torch.Tensor) -> Any:
        """With e the errors and z the normalised x: w / s (e - mean(e) - z mean(e z)), means over all."""
        (x, weight, mean, variance), error = ctx.saved_tensors, errors[0]
        scale = torch.ones_like(mean) if weight is None else weight
        # As for moments that don't depend on x, which gives the sums of this trainer too.
        to_x, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
            error, x, scale, mean, variance, None, None, False, ctx.layer.eps, [True, True, True]
        )
        place = f"{ctx.layer.place}: gradients of its statistics"
        rows = ctx.layer.statistics.of_all(torch.cat([to_bias, to_weight]).double(), place)
        means = rows.sum(0).view(2, -1) / ctx.n
        inverse = (variance.double() + ctx.layer.eps).rsqrt()
        offset, slope = scale * inverse * means[0], scale * inverse.square() * means[1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        offset, slope, centre = (values.to(mean.dtype).view(shape) for values in (offset, slope, mean))
        if ctx.layer.statistics.counted:
            to_x = to_x - (x - centre).mul_(slope).add_(offset).to(to_x.dtype)
        affine = weight is not None
        return to_x, to_weight if affine else None, to_bias if affine else None, None


def _moments_of_all(x: torch.Tensor, layer: _OverAll) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many values a channel has in all trainers' x, their mean and variance: (), (channel,), float64."""
    n_channels = x.shape[1]
    row = torch.zeros(2 * n_channels + 1, dtype=torch.float64, device=x.device)
    n_own = x.numel() // n_channels
    if layer.statistics.counted:
        values = x.float() if x.dtype.itemsize < torch.float32.itemsize else x
        variance, mean = torch.var_mean(values, [0, *range(2, x.dim())], correction=0)
        row[0], row[1 : n_channels + 1], row[n_channels + 1 :] = n_own, mean, variance.double() * n_own
    rows = layer.statistics.of_all(row, f"{layer.place}: statistics")
    counts, means, squares = rows[:, :1], rows[:, 1 : n_channels + 1], rows[:, n_channels + 1 :]
    n = counts.sum()
    mean = (counts * means).sum(0) / n
    return n, mean, (squares + counts * (means - mean).square()).sum(0) / n


def widest(model: nn.Module) -> int:
    """Channels of the widest layer of batch normalisation. Raises UserError where they can't be replaced."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    for name, layer in layers.items():
        if type(layer) not in _KINDS:
            kind = type(layer)
            raise UserError(
                f"sync_batch_norm: {name} is a {kind.__module__}.{kind.__qualname__}, and only torch's own "
                "BatchNorm1d, 2d and 3d can be given the statistics of all: set sync_batch_norm: false"
            )
    if not layers:
        raise UserError(
            "sync_batch_norm: this network has no batch normalisation: set sync_batch_norm: false"
        )
    return max(layer.num_features for layer in layers.values())


def install(model: nn.Module, statistics: Statistics) -> None:
    """Makes every layer of batch normalisation one of ours: the same module, with other statistics."""
    for name, module in model.named_modules():
        if type(module) in _KINDS:
            module.__class__ = _KINDS[type(module)]
            module.statistics, module.place = statistics, name
