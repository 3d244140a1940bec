"""Local group self-attention in eager torch: for export, and where no kernel applies."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..reference import inside, windows
from .attention import probabilities

_WORD = 2**32 - 1


class Window(NamedTuple):
    """The rows and columns of a window, in pixels."""

    rows: int
    columns: int

    def covers(self, height: int, width: int) -> bool:
        """Whether the window of every pixel is the whole image."""
        return self.rows >= 2 * height - 1 and self.columns >= 2 * width - 1


class Problem(NamedTuple):
    """The arguments of `local_group_attention` for some of the heads, whose numbers are ``heads``, ``(B, heads)``."""

    qkv: Tensor
    position: Tensor
    pose: Tensor | None
    seed: Tensor | None
    heads: Tensor
    window: Window
    scale: float
    dropout: float


class _Neighbors(NamedTuple):
    """Keys and values as `reference.group_self_attention` takes them, and the tap of the window of each neighbor."""

    key: Tensor
    value: Tensor
    taps: Tensor
    position: Tensor
    mask: Tensor | None


def attend(given: Problem) -> Tensor:
    """`local_group_attention`, differentiable: ``(B, heads, d, |V|, height, width)``."""
    near = _neighbors(given)
    query = given.qkv[:, 0].flatten(-2) * given.scale
    among_poses, among_places = probabilities(query, near.key, near.position, given.pose, near.mask)
    if given.seed is not None:
        among_poses = among_poses * _survivors(given, near.taps)
    among_poses, among_places = among_poses.to(query.dtype), among_places.to(query.dtype)
    weights = torch.einsum("bnvgij,bngimj->bnvimj", among_places, among_poses)
    return torch.einsum("bnvimj,bncmij->bncvi", weights, near.value).unflatten(-1, given.qkv.shape[-2:])


def attend_backward(given: Problem, grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of qkv, position and, if there is one, pose."""

    def function(qkv: Tensor, position: Tensor, pose: Tensor | None = None) -> Tensor:
        return attend(given._replace(qkv=qkv, position=position, pose=pose))

    # Autograd is off inside an operator; torch.func is not.
    inputs = (given.qkv, given.position) if given.pose is None else (given.qkv, given.position, given.pose)
    grads: tuple[Tensor, ...] = torch.func.vjp(function, *inputs)[1](grad)
    return grads


def _neighbors(given: Problem) -> _Neighbors:
    height, width = given.qkv.shape[-2:]
    position, window = given.position, given.window
    if window.covers(height, width):
        rows, columns = (torch.arange(side, device=given.qkv.device) for side in (height, width))
        row = (rows[None, :] - rows[:, None] + window.rows // 2)[:, None, :, None]
        column = (columns[None, :] - columns[:, None] + window.columns // 2)[None, :, None, :]
        taps = (row * window.columns + column).flatten(2).flatten(0, 1)
        codes = position.index_select(2, taps.flatten()).unflatten(2, taps.shape)
        key, value = given.qkv[:, 1:].flatten(-2).unsqueeze(-2).unbind(1)
        return _Neighbors(key, value, taps, codes, None)
    key, value = (windows(t, window) for t in given.qkv[:, 1:].unbind(1))
    taps = torch.arange(position.shape[2], device=position.device)[None]
    mask = inside(height, width, window, position.device)
    return _Neighbors(key, value, taps, position.unsqueeze(2), mask)


def _survivors(given: Problem, taps: Tensor) -> Tensor:
    """``1/(1 − dropout)`` where a pose and neighbor is kept, else 0: ``(B, heads, |G|, places, |M|, neighbors)``.

    A hash of the seed and of the index of the score, the same here and in all kernels: the backward pass draws what
    the forward pass drew, whatever the order of computation and the device.
    """
    assert given.seed is not None
    order, device = given.qkv.shape[4], taps.device
    poses = torch.arange(order, device=device)
    pairs = (poses[:, None] * order + poses)[:, None, :, None]  # g, i, m, j
    row = given.heads[:, :, None, None, None, None] * given.position.shape[2] + taps[:, None]
    row = row * order**2 + pairs
    low = _hash((row ^ given.seed) & _WORD)
    high = _hash((low + (given.seed >> 32)) & _WORD)
    places = torch.arange(given.qkv.shape[-2:].numel(), device=device)[:, None, None]
    x = (places * 0x9E3779B9 + low) & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D & _WORD) ^ high
    x = (x ^ (x >> 15)) * 0x846CA68B & _WORD
    kept = (x ^ (x >> 16)) >= dropped_below(given.dropout)
    return kept.to(given.qkv.dtype) / (1 - given.dropout)


def dropped_below(dropout: float) -> int:
    """The 32-bit threshold below which the hash of a score drops it."""
    return min(int(dropout * 2**32), _WORD)


def _hash(x: Tensor) -> Tensor:
    x = (x ^ (x >> 16)) * 0x7FEB352D & _WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & _WORD
    return x ^ (x >> 16)
