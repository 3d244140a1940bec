"""Equivariance errors of networks and layers.

Features of an equivariant network satisfy ``Φ(g x) = g Φ(x)``, its logits ``Φ(g x) = Φ(x)``. The error is the relative
L2 norm ``‖Φ(g x) − g Φ(x)‖ / ‖Φ(x)‖``, without unit: about 1e-15 for an exact network in float64, of the order of 1 for
a network that is not equivariant.

How g acts on an input or output follows from its shape:

- ``(B, C, |H|, height, width)`` is a regular field of the group H, whose group axis g permutes too;
- ``(B, C, height, width)`` is an image or a map: g moves its pixels. So is an output ``(B, height, width)`` with the
  sides of the image, such as a mask;
- everything else is invariant, such as logits ``(B, C)``.

The planes that ``features_only=True`` returns are regular fields, ``(B, C·|H|, height, width)``, and are compared as
such. Planes that another module returns are not told from maps: ``planes.unflatten(1, (-1, group.order))`` makes fields
of them. Of lists, tuples and dictionaries each tensor is compared.
"""

from .errors import (
    EquivarianceReport,
    element_errors,
    equivariance_error,
    equivariance_report,
    group_layers,
    group_of,
    group_to_check,
    in_float64,
    is_subgroup,
    module_group,
    noise_images,
    tensors_of,
    unwrapped,
    without_parallel,
)
from .untrained import looks_untrained, randomize_norms

__all__ = [
    "EquivarianceReport",
    "element_errors",
    "equivariance_error",
    "equivariance_report",
    "group_layers",
    "group_of",
    "group_to_check",
    "in_float64",
    "is_subgroup",
    "looks_untrained",
    "module_group",
    "noise_images",
    "randomize_norms",
    "tensors_of",
    "unwrapped",
    "without_parallel",
]
