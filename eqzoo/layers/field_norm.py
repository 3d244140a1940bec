"""Normalization over fields and poses at each position, and layer scale."""

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d, LayerScale2d
from torch import Tensor, nn

from ..groups import Group
from ._checks import check_field
from ._plain import written_out


class FieldLayerNorm2d(nn.Module):
    """Layer normalization at each position: a mean and a variance for every pixel, over its fields and poses.

    ``y = (x − E[x]) / √(Var[x] + eps) · γ + β`` with mean and variance over C and |H| at each position of each image,
    and one γ and one β per field: what timm's ``LayerNorm2d`` computes on the planes, with weights tied over the group.
    `GroupLayerNorm2d` has one mean and one variance for the whole sample instead.

    Args:
        group: The point group H.
        num_features: The number of regular fields, C.
        eps: Added to the variance.

    Shape:
        ``(B, C, |H|, height, width)`` to the same, with channels last in memory; the parameters are ``(C,)``.

    References:
        A ConvNet for the 2020s (Liu et al., 2022), section 2.6, for the plain layer, https://arxiv.org/abs/2201.03545

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4
        >>> FieldLayerNorm2d(P4, 16)(torch.randn(2, 16, 4, 8, 8)).shape
        torch.Size([2, 16, 4, 8, 8])
    """

    def __init__(self, group: Group, num_features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.group = group
        self.num_features = num_features
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(num_features))
        self.bias = nn.Parameter(torch.empty(num_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets weight to 1 and bias to 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        check_field(self, x, self.num_features, self.group.order)
        shape = (self.group.order, self.num_features)
        y = F.layer_norm(x.permute(0, 3, 4, 2, 1), shape, self.weight.expand(shape), self.bias.expand(shape), self.eps)
        return y.permute(0, 4, 3, 1, 2)

    def fuse(self) -> nn.Module:
        """The same map as timm's ``LayerNorm2d`` on planes, ``(B, C·|H|, height, width)``."""
        norm = LayerNorm2d(self.num_features * self.group.order, self.eps)
        return written_out(norm, self, self.group.order, weight=self.weight, bias=self.bias)

    def extra_repr(self) -> str:
        return f"{self.group.name}, {self.num_features}, eps={self.eps}"


class FieldLayerScale2d(nn.Module):
    """Multiplies every field by a learned factor: ``out(c, h, x) = γ_c f(c, h, x)``.

    Args:
        group: The point group H.
        channels: The number of regular fields, C.
        init_value: The first value of the factors.

    Shape:
        ``(B, C, |H|, height, width)`` to the same; the parameter is ``(C,)``.

    References:
        Going Deeper with Image Transformers (Touvron et al., 2021), section 2, https://arxiv.org/abs/2103.17239

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4
        >>> FieldLayerScale2d(P4, 2, init_value=0.5)(torch.ones(1, 2, 4, 1, 1)).unique()
        tensor([0.5000], grad_fn=<Unique2Backward0>)
    """

    def __init__(self, group: Group, channels: int, init_value: float = 1e-6) -> None:
        super().__init__()
        self.group = group
        self.init_value = init_value
        self.gamma = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets all factors to ``init_value``."""
        nn.init.constant_(self.gamma, self.init_value)

    def forward(self, x: Tensor) -> Tensor:
        check_field(self, x, len(self.gamma), self.group.order)
        return x * self.gamma.view(-1, 1, 1, 1)

    def fuse(self) -> nn.Module:
        """The same map as timm's ``LayerScale2d`` on planes, ``(B, C·|H|, height, width)``."""
        scale = LayerScale2d(len(self.gamma) * self.group.order)
        return written_out(scale, self, self.group.order, gamma=self.gamma)

    def extra_repr(self) -> str:
        return f"{self.group.name}, {len(self.gamma)}"
