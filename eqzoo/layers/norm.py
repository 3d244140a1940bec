"""Batch and layer normalization with statistics shared over the group."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..groups import Group
from ..ops import batch_norm
from ._checks import check_field
from ._plain import written_out

_STATISTICS = ("running_mean", "running_var")
_HALF = (torch.float16, torch.bfloat16)
_LARGEST = 30_000.0  # variance in a fused norm, below the largest number of float16


class GroupBatchNorm2d(nn.BatchNorm3d):
    """Batch normalization with statistics and affine shared over the group.

    ``y = (x − E[x]) / √(Var[x] + eps) · γ + β`` with mean and variance over batch, group, height and width: one γ and
    one β per field. Separate ones for each element would break equivariance as soon as they are trained.

    Args:
        group: The point group H.
        num_features: The number of regular fields, C.
        eps: Added to the variance.
        momentum: The weight of a batch in the running statistics.

    Shape:
        ``(B, C, |H|, height, width)`` to the same; the parameters are ``(C,)``. ``forward(x, residual=None,
        relu=False)`` adds a field of the same shape to y and applies a ReLU, in the same pass through memory; the plain
        norm of a fused network does not, so networks call `norm_act`, which takes both.

    References:
        Group Equivariant Convolutional Networks (Cohen and Welling, 2016), section 8
        https://arxiv.org/abs/1602.07576

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4
        >>> GroupBatchNorm2d(P4, 16)(torch.randn(2, 16, 4, 8, 8)).shape
        torch.Size([2, 16, 4, 8, 8])
    """

    def __init__(self, group: Group, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps=eps, momentum=momentum)
        self.group = group

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GroupBatchNorm2d":
        """Casts and moves as any module does, but keeps running statistics in float32 where they would get 16 bits.

        Variances of trained networks exceed 65,504, the largest number of float16.
        """
        kept = {name: buffer for name in _STATISTICS if (buffer := self._buffers[name]) is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if after is not None and after.dtype in _HALF and before.dtype not in _HALF:
                self._buffers[name] = before.to(after.device, torch.float32)
        return self

    def forward(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        check_field(self, x, self.num_features, self.group.order)
        momentum = self._momentum()
        of_batch = self.training or self.running_mean is None
        mean, var = (
            (None, None) if self.training and not self.track_running_stats else (self.running_mean, self.running_var)
        )
        return batch_norm(x, mean, var, self.weight, self.bias, of_batch, momentum, self.eps, residual, relu)

    def _momentum(self) -> float:
        """The weight of this batch in the running statistics; counts it."""
        if not self.training or self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def extra_repr(self) -> str:
        return f"{self.group.name}, {super().extra_repr()}"

    def fuse(self) -> nn.BatchNorm2d:
        """The equivalent plain `torch.nn.BatchNorm2d` on planes in evaluation mode, ``(B, C·|H|, h, w)``.

        For inference only: in training mode the plain layer has separate statistics for every plane.
        """
        norm = nn.BatchNorm2d(self.num_features * self.group.order, self.eps, self.momentum or 0.0)
        assert self.running_mean is not None
        assert self.running_var is not None
        with torch.no_grad():
            # What of a variance exceeds the range of float16 goes into the scale, so that the plain layer may be cast.
            var = self.running_var.clamp(max=_LARGEST)
            scale = self.weight * ((var + self.eps) / (self.running_var + self.eps)).sqrt().to(self.weight.dtype)
        statistics = {"running_mean": self.running_mean, "running_var": var}
        return written_out(norm, self, self.group.order, weight=scale, bias=self.bias, **statistics)


class GroupLayerNorm2d(nn.GroupNorm):
    """Layer normalization of a sample as a whole: one mean and variance over its fields, poses and positions.

    ``y = (x − E[x]) / √(Var[x] + eps) · γ + β`` with mean and variance over C, |H|, height and width of each sample,
    and one γ and one β per field. It does not depend on the batch, so training and evaluation mode are the same.
    `FieldLayerNorm2d` has a mean and a variance for each position instead.

    Args:
        group: The point group H.
        num_features: The number of regular fields, C.
        eps: Added to the variance.

    Shape:
        ``(B, C, |H|, height, width)`` to the same; the parameters are ``(C,)``.

    References:
        Layer Normalization (Ba et al., 2016), section 3
        https://arxiv.org/abs/1607.06450
        Group Equivariant Stand-Alone Self-Attention for Vision (Romero and Cordonnier, 2021), appendix F
        https://arxiv.org/abs/2010.00977

    Example:
        >>> from eqzoo.groups import P4
        >>> GroupLayerNorm2d(P4, 16)(torch.randn(2, 16, 4, 8, 8)).shape
        torch.Size([2, 16, 4, 8, 8])
    """

    def __init__(self, group: Group, num_features: int, eps: float = 1e-5) -> None:
        super().__init__(1, num_features, eps=eps)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        check_field(self, x, self.num_channels, self.group.order)
        return super().forward(x)

    def extra_repr(self) -> str:
        return f"{self.group.name}, {self.num_channels}, eps={self.eps}"

    def fuse(self) -> nn.GroupNorm:
        """The equivalent plain `torch.nn.GroupNorm` with one group on planes, ``(B, C·|H|, height, width)``."""
        norm = nn.GroupNorm(1, self.num_channels * self.group.order, self.eps)
        return written_out(norm, self, self.group.order, weight=self.weight, bias=self.bias)
