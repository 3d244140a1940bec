"""Which group convolutions run through the irreps of the group: where there are kernels, and they are the faster."""

import math
from typing import Any

import torch
from torch import Tensor

from ...groups import Group
from .. import _compile
from .._compile import WITH_BFLOAT16, has_avx2_alone, multiplies_bfloat16
from .._dispatch import forced, plain
from .._layout import is_last

# From which C·C'/(C + C') on group convolutions are faster through the irreps, for each order of a group. In float32:
# of k x k filters, and of 1 x 1 filters with channels last, contiguous, and with large contiguous images in inference
# and in training. Measured over the convolutions of all registered networks; none has fields of two elements.
_LEAST = {2: (16, 32, 64, math.inf, 64), 4: (6, 9, 6.4, 48, 9), 8: (3.3, 5, 5.5, 9.5, 9)}
# The same with AVX2 alone, whose vectors fewer fields fill; no network has fewer fields with k x k filters. Groups of
# two elements were not measured.
_LEAST_OF_AVX2 = {2: _LEAST[2], 4: (4, 6.4, 6.4, 9.6, 8), 8: (3, 4, 5.5, 4.8, 4.8)}
# The numbers of a large contiguous image, field and output.
_LARGE = 192 * 1024
# In bfloat16: of k x k and of 1 x 1 filters, with channels last in inference and in training, and contiguous in both.
# Measured in the same way.
_LEAST_IN_BFLOAT16 = {
    2: ((32, 24, 32, 24), (128, 64, 128, 64)),
    4: ((16, 8.7, 9.7, 9.7), (38, 19.5, 6, 6)),
    8: ((7.5, 6.7, 6.7, 5.4), (19, 12.5, 5, 5)),
}
# From how many fields where oneDNN multiplies bfloat16 and kernels compute in float32, as on ARM.
_LEAST_FIELDS_BFLOAT16 = {8: 40}


def through_irreps(field: Tensor, filters: Tensor, group: Group) -> bool:
    """Whether a group convolution runs through the irreps: where there are kernels, and where they are the faster."""
    dtype, has_irreps = computed_in(field), group.order == 2 or group.rotations == 4
    if plain() or forced("reference") or forced("expanded") or not has_irreps:
        return False
    if not (field.is_cpu and filters.is_cpu) or dtype not in WITH_BFLOAT16 or dtype != computed_in(filters):
        return False
    if forced("irreps"):
        return True
    fields, layout = (field.shape[1], len(filters)), (is_last(field), torch.is_grad_enabled())
    if dtype == torch.bfloat16 and multiplies_bfloat16():
        if multiplies():
            return faster_in_bfloat16(group, *fields, filters.shape[-1], *layout)
        return min(fields) >= _LEAST_FIELDS_BFLOAT16.get(group.order, math.inf) and _has_kernel(dtype)
    pixels = field.shape[-2] * field.shape[-1]
    return faster(group, *fields, filters.shape[-1], pixels, *layout) and _has_kernel(dtype)


@torch.compiler.assume_constant_result
def _has_kernel(dtype: torch.dtype) -> bool:
    return kernel("", torch.empty(0, dtype=dtype, device="cpu")) is not None


@torch.compiler.assume_constant_result
def multiplies() -> bool:
    """Whether kernels multiply in bfloat16, as they were compiled here."""
    function = kernel("_multiplies", torch.empty(0, dtype=torch.bfloat16, device="cpu"))
    return function is not None and function() == 1


def computed_in(x: Tensor) -> torch.dtype:
    """The type of a field or of filters, also under autocast."""
    device = x.device.type
    if x.dtype != torch.float64 and device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def kernel(name: str, *tensors: Tensor) -> Any:
    """The C++ function ``group_conv2d<name>`` for the type of the tensors, or None."""
    return _compile.cpu_function("group_conv/cpu", f"group_conv2d{name}", *tensors, scalars=WITH_BFLOAT16)


def faster(
    group: Group, channels: int, out_channels: int, side: int, pixels: int, last: bool, trains: bool = True
) -> bool:
    """Whether the irreps are the faster way on a CPU, by measurement in float32.

    What they save are C·C' k² products a pixel, what they cost are transforms of (C + C') k² numbers: the quotient of
    the two decides. Contiguous fields are transposed as well, which costs most where caches do not hold an image;
    torch's own convolution transposes them too, for k x k filters and in training.
    """
    filters, last_ones, ones, *large = (_LEAST_OF_AVX2 if has_avx2_alone() else _LEAST)[group.order]
    if side > 1:
        least = filters
    elif last:
        least = last_ones
    else:
        least = large[trains] if (channels + out_channels) * group.order * pixels >= _LARGE else ones
    return _saved_by_cost(channels, out_channels) >= least


def faster_in_bfloat16(
    group: Group, channels: int, out_channels: int, side: int, last: bool, trains: bool = True
) -> bool:
    """The same in bfloat16, where both forms use the processor's bfloat16 products.

    These cost little beside the transforms, which are computed in float32: irreps pay from more fields on. The expanded
    form of contiguous fields pays for transposing them too.
    """
    least = _LEAST_IN_BFLOAT16[group.order][side == 1]
    return _saved_by_cost(channels, out_channels) >= least[trains if last else 2 + trains]


def _saved_by_cost(channels: int, out_channels: int) -> float:
    return channels * out_channels / (channels + out_channels)
