"""A norm together with the sum and the ReLU behind it: one pass over memory instead of three."""

import torch.nn.modules.module as torch_module
from torch import Tensor, nn

from .norm import GroupBatchNorm2d


class FusedSequential(nn.Sequential):
    """`torch.nn.Sequential`, whose group batch norms take the ReLU behind them along.

    Modules, their names and what comes out are those of the plain sequence; a module with hooks runs by itself. With a
    residual, or an activation of the caller's, the result is ``act(sequence(x) + residual)``.

    Shape:
        As the modules'; the residual is of the shape of the output.

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4
        >>> net = FusedSequential(GroupBatchNorm2d(P4, 2), nn.ReLU())
        >>> net(torch.randn(3, 2, 4, 5, 5)).min()
        tensor(0., grad_fn=<MinBackward1>)
    """

    def forward(self, input: Tensor, residual: Tensor | None = None, act: nn.Module | None = None) -> Tensor:  # noqa: A002
        layers = list(self)
        while layers and type(layers[-1]) is nn.Identity and not _has_hooks(layers[-1]):
            layers.pop()
        x, place = input, 0
        while place < len(layers) - 1:
            layer, behind = layers[place : place + 2]
            if _fuses(layer, behind):
                x, place = layer(x, relu=True), place + 2
            else:
                x, place = layer(x), place + 1
        # The last one, unless a ReLU was it, and what comes behind.
        last = layers[place] if place < len(layers) else nn.Identity()
        return norm_act(last, act, x, residual)


def norm_act(norm: nn.Module, act: nn.Module | None, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """``act(norm(x) + residual)``, in one operation where norm and act are a group batch norm and a ReLU.

    In a fused network, whose norms are plain ones, it gives the same in several.

    Args:
        norm: Any module.
        act: Any module; None for none.
        x: What the norm takes.
        residual: A field to add, of the shape of the norm's output; None for none.

    Example:
        >>> import torch
        >>> from eqzoo.groups import P4
        >>> x = torch.randn(3, 2, 4, 5, 5)
        >>> norm_act(GroupBatchNorm2d(P4, 2), nn.ReLU(), x, residual=x).shape
        torch.Size([3, 2, 4, 5, 5])
    """
    if _takes_residual_and_relu(norm) and not _is_watched(norm) and (act is None or _fuses(norm, act)):
        fused: Tensor = norm(x, residual=residual, relu=act is not None)
        return fused
    y: Tensor = norm(x)
    if residual is not None:
        y = y + residual
    return y if act is None else act(y)


def _fuses(norm: nn.Module, act: nn.Module) -> bool:
    if not _takes_residual_and_relu(norm) or type(act) is not nn.ReLU:
        return False
    return not (_is_watched(norm) or _has_hooks(act))


def _takes_residual_and_relu(norm: nn.Module) -> bool:
    """Whether it is a group batch norm; one whose ``forward`` is the user's own takes no residual and no ReLU."""
    own = type(norm).forward is not GroupBatchNorm2d.forward or "forward" in vars(norm)
    return isinstance(norm, GroupBatchNorm2d) and not own


def _has_hooks(module: nn.Module) -> bool:
    """Whether somebody looks at this module, its input included."""
    return _is_watched(module) or bool(module._forward_pre_hooks)


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody looks at what this module gives, or at what comes back to it."""
    hooks = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or torch_module._has_any_global_hook()
