"""Normalisation that treats all transformed copies of a feature alike."""

import torch
from torch import Tensor, nn

from ..groups import Group
from ._layout import group_last, is_channels_last

__all__ = ["GroupBatchNorm2d", "GroupLayerNorm2d"]


class GroupBatchNorm2d(nn.BatchNorm3d):
    """Batch normalisation with statistics and affine shared over the group.

    ``y = (x − E[x]) / √(Var[x] + eps) · γ + β`` with mean and variance over batch, group, height and width: one γ and
    one β a field. Separate ones for each element would break equivariance as soon as they are trained.

    Args:
        group: The point group H.
        num_features: The number of regular fields, C.
        eps: Added to the variance.
        momentum: The weight of a batch in the running statistics.

    Shape:
        ``(B, C, |H|, height, width)`` to the same; the parameters are ``(C,)``.

    Raises:
        ValueError: If the input has another shape.

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

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 5 or tuple(x.shape[1:3]) != (self.num_features, self.group.order):
            raise ValueError(
                f"GroupBatchNorm2d({self.group.name}) takes (B, {self.num_features}, {self.group.order}, height, "
                f"width), got {tuple(x.shape)}"
            )
        if is_channels_last(x):
            return super().forward(group_last(x)).permute(0, 1, 4, 2, 3)
        return super().forward(x)

    def fuse(self) -> nn.BatchNorm2d:
        """The same map in evaluation mode as a plain `torch.nn.BatchNorm2d` on planes, ``(B, C·|H|, h, w)``.

        In training mode the plain layer keeps statistics of its own for every plane, so fuse for inference.
        """
        norm = nn.BatchNorm2d(self.num_features * self.group.order, self.eps, self.momentum or 0.0)
        norm = norm.to(self.weight.device, self.weight.dtype)
        with torch.no_grad():
            for name in ("weight", "bias", "running_mean", "running_var"):
                getattr(norm, name).copy_(getattr(self, name).repeat_interleave(self.group.order))
        return norm.train(self.training)


class GroupLayerNorm2d(nn.GroupNorm):
    """Layer normalisation of a whole field: statistics over channels, group and space, one affine a field.

    ``y = (x − E[x]) / √(Var[x] + eps) · γ + β`` with mean and variance over C, |H|, height and width of each sample.
    It knows no batch, so training and evaluation are the same map.

    Args:
        group: The point group H.
        num_features: The number of regular fields, C.
        eps: Added to the variance.

    Shape:
        ``(B, C, |H|, height, width)`` to the same; the parameters are ``(C,)``.

    Raises:
        ValueError: If the input has another shape.

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

    def __init__(self, group: Group, num_features: int, eps: float = 1e-12) -> None:
        super().__init__(1, num_features, eps=eps)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 5 or tuple(x.shape[1:3]) != (self.num_channels, self.group.order):
            raise ValueError(
                f"GroupLayerNorm2d({self.group.name}) takes (B, {self.num_channels}, {self.group.order}, height, "
                f"width), got {tuple(x.shape)}"
            )
        return super().forward(x)

    def fuse(self) -> nn.GroupNorm:
        """The same map as a plain `torch.nn.GroupNorm` of one group on planes, ``(B, C·|H|, height, width)``."""
        norm = nn.GroupNorm(1, self.num_channels * self.group.order, self.eps)
        norm = norm.to(self.weight.device, self.weight.dtype)
        with torch.no_grad():
            norm.weight.copy_(self.weight.repeat_interleave(self.group.order))
            norm.bias.copy_(self.bias.repeat_interleave(self.group.order))
        return norm.train(self.training)
