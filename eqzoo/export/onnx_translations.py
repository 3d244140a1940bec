"""ONNX translations of torch operators that are fast in ONNX Runtime, where the exporter's own are slow.

A product of tensors becomes a MatMul or a few multiplications instead of an Einsum, and im2col becomes slices, which
copy whole rows, instead of a Gather of single numbers.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

# A sum of at most _SHORT_SUM products is written out if the result of a MatMul would have at most _TINY_MATRIX entries:
# its overhead would outweigh the multiplications.
_SHORT_SUM = 8
_TINY_MATRIX = 64
_END = 2**63 - 1
_BOUNDS = "eqzoo.bounds"  # metadata of a Slice: start, end and step for each axis


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The ``custom_translation_table`` for torch's exporter."""
    aten = torch.ops.aten
    return {
        aten.einsum.default: _einsum,
        aten.im2col.default: _im2col,
        aten.addcmul.default: _addcmul,
        aten._softmax.default: _softmax,
        aten.softmax.int: _softmax,
        aten.logsumexp.default: _logsumexp,
        aten.slice.Tensor: _slice,
    }


def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """A slice; successive slices along different axes are merged into one."""
    op = _opset()
    own = (start or 0, _END if end is None else end, step)
    if own == (0, _END, 1):
        return x
    bounds = {dim % len(x.shape): own}
    node = x.producer()
    before = node.meta.get(_BOUNDS, {}) if node is not None else {}
    if before and not before.keys() & bounds.keys():
        bounds |= before
        x = node.inputs[0]
    starts, ends, steps = zip(*bounds.values(), strict=True)
    y = op.Slice(x, _numbers(*starts), _numbers(*ends), _numbers(*bounds), _numbers(*steps))
    y.producer().meta[_BOUNDS] = bounds
    return y


def _softmax(x: Any, dim: int, _: Any = None) -> Any:
    """Softmax; along an axis other than the last in steps, for which the runtime would transpose twice."""
    op = _opset()
    axis = dim % len(x.shape)
    if axis == len(x.shape) - 1:
        return op.Softmax(x, axis=-1)
    _, powers, total = _exponentials(x, axis)
    return op.Div(powers, total)


def _logsumexp(x: Any, dim: Sequence[int], keepdim: bool = False) -> Any:
    """``max + log Σ exp(x − max)`` of finite scores, in steps shared with a softmax of the same scores."""
    op = _opset()
    (axis,) = (d % len(x.shape) for d in dim)
    largest, _, total = _exponentials(x, axis)
    y = op.Add(op.Log(total), largest)
    return y if keepdim else op.Squeeze(y, _numbers(axis))


def _exponentials(x: Any, axis: int) -> tuple[Any, Any, Any]:
    """The maximum along an axis, the exponentials of the differences from it, and their sum."""
    op = _opset()
    largest = op.ReduceMax(x, _numbers(axis), keepdims=1)
    powers = op.Exp(op.Sub(x, largest))
    return largest, powers, op.ReduceSum(powers, _numbers(axis), keepdims=1)


def _addcmul(x: Any, first: Any, second: Any, value: float = 1.0) -> Any:
    """``x + value · first · second``; no multiplication by a value of 1."""
    op = _opset()
    product = op.Mul(first, second)
    if value != 1:
        product = op.Mul(product, op.CastLike(op.Constant(value_float=float(value)), product))
    return op.Add(x, product)


def _im2col(
    x: Any,
    kernel_size: Sequence[int],
    dilation: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    stride: Sequence[int] = (1, 1),
) -> Any:
    """The neighborhoods ``(B, C·k·k, positions)`` of planes: shifts along the width, then along the height."""
    op = _opset()
    channels, *sides = x.shape[1:]
    y = op.Pad(x, _numbers(0, 0, *padding, 0, 0, *padding))
    for axis in (1, 0):
        # The taps become an axis after the channels: columns first, then rows before them.
        y = op.Unsqueeze(y, _numbers(2))
        span = sides[axis] + 2 * padding[axis] - dilation[axis] * (kernel_size[axis] - 1)
        starts = [dilation[axis] * tap for tap in range(kernel_size[axis])]
        ends, along, step = [start + span for start in starts], _numbers(axis - 2), _numbers(stride[axis])
        parts = [
            op.Slice(y, _numbers(start), _numbers(end), along, step) for start, end in zip(starts, ends, strict=True)
        ]
        y = op.Concat(*parts, axis=2)
    return op.Reshape(y, _numbers(0, channels * math.prod(kernel_size), -1))


def _einsum(equation: str, tensors: Sequence[Any], path: Sequence[int] | None = None) -> Any:
    """A product of two tensors, summed over shared labels; other equations stay an Einsum."""
    del path  # there is only one order of two factors
    product = _Product.of(equation.replace(" ", ""), tensors)
    if product is None:
        return _opset().Einsum(*tensors, equation=equation)
    y = product.written_out() if product.is_tiny else product.as_matrices()
    missing = [axis for axis, label in enumerate(product.result) if label not in product.sizes]
    return _opset().Unsqueeze(y, _numbers(*missing)) if missing else y


@dataclass(frozen=True)
class _Factor:
    """A tensor with one-letter labels of its axes; axes of length 1 are removed."""

    value: Any
    labels: str

    @staticmethod
    def of(value: Any, labels: str) -> "_Factor":
        ones = [axis for axis, size in enumerate(value.shape) if size == 1]
        kept = "".join(label for axis, label in enumerate(labels) if axis not in ones)
        return _Factor(_opset().Squeeze(value, _numbers(*ones)) if ones else value, kept)

    def ordered(self, order: str) -> Any:
        """The tensor with its axes in another order."""
        if order == self.labels:
            return self.value
        return _opset().Transpose(self.value, perm=[self.labels.index(label) for label in order])

    def only(self, labels: Iterable[str]) -> str:
        """Those of the labels that it has, in their order."""
        return "".join(label for label in labels if label in self.labels)


@dataclass(frozen=True)
class _Product:
    """Two factors, the labels of the result and those summed over, in order, and the length of each axis."""

    left: _Factor
    right: _Factor
    result: str
    summed: str
    sizes: dict[str, Any]

    @staticmethod
    def of(equation: str, tensors: Sequence[Any]) -> "_Product | None":
        terms, _, result = equation.partition("->")
        labels = terms.split(",")
        if len(tensors) != 2 or not equation.replace(",", "").replace("->", "").isalpha() or not result:
            return None
        sizes: dict[str, Any] = {}
        for term, tensor in zip(labels, tensors, strict=True):
            if len(set(term)) < len(term) or tensor.shape is None:
                return None
            sizes |= {label: size for label, size in zip(term, tensor.shape, strict=True) if size != 1}
        left, right = (_Factor.of(tensor, term) for tensor, term in zip(tensors, labels, strict=True))
        summed = "".join(label for label in left.labels if label not in result)
        alone = [label for label in right.labels if label not in result and label not in summed]
        if alone or not set(summed) <= set(right.labels):
            return None
        axes = [
            [result.index(label) for label in f.labels if label not in o.labels]
            for f, o in ((left, right), (right, left))
        ]
        if axes[1] and (not axes[0] or axes[1][0] < axes[0][0]):
            left, right = right, left
        return _Product(left, right, result, summed, sizes)

    @property
    def batch(self) -> str:
        """The labels of both factors, after the dynamic batch, which is broadcast if a factor lacks it."""
        symbols = [label for label in self.result if not isinstance(self.sizes.get(label, 1), int)]
        both = self.left.only(self.right.only(self.result))
        return "".join([*symbols, *(label for label in both if label not in symbols)])

    def free(self, factor: _Factor) -> str:
        """The labels of the result that only this factor has."""
        return "".join(label for label in factor.only(self.result) if label not in self.batch)

    def length(self, labels: Iterable[str]) -> int:
        """The number of entries that the labels span."""
        return math.prod(self.sizes[label] for label in labels)

    @property
    def is_tiny(self) -> bool:
        """Whether a MatMul would be too small to be worth its overhead."""
        entries = self.length(self.free(self.left) + self.free(self.right))
        is_short = len(self.summed) == 1 and self.length(self.summed) <= _SHORT_SUM
        return not self.summed or (is_short and entries <= _TINY_MATRIX)

    def written_out(self) -> Any:
        """``Σ_k a_k b_k`` as products and sums of tensors with the axes of the result."""
        op = _opset()
        split = [self._slices(factor) for factor in (self.left, self.right)]
        return reduce(op.Add, [op.Mul(a, b) for a, b in zip(*split, strict=True)])

    def _slices(self, factor: _Factor) -> list[Any]:
        op = _opset()
        order = self.summed + factor.only(self.result)
        value, count = factor.ordered(order), self.length(self.summed)
        present = [label for label in self.result if label in self.sizes]
        gaps = [axis for axis, label in enumerate(present) if label not in factor.labels]
        parts = [op.Gather(value, op.Constant(value_int=k), axis=0) for k in range(count)] if self.summed else [value]
        return [op.Unsqueeze(part, _numbers(*gaps)) if gaps else part for part in parts]

    def as_matrices(self) -> Any:
        """One batched MatMul, whose rows and columns are the free labels."""
        op = _opset()
        rows, columns = self.free(self.left), self.free(self.right)
        # The larger factor determines the order of the summed labels, so that it need not be transposed.
        longer = max(
            self.left, self.right, key=lambda f: self.length(label for label in f.labels if label in rows + columns)
        )
        summed = longer.only(label for label in longer.labels if label in self.summed)
        y = op.MatMul(self._matrix(self.left, rows, summed, False), self._matrix(self.right, columns, summed, True))
        order = self.batch + rows + columns
        y = op.Reshape(y, _numbers(*[0] * len(self.batch), *(self.sizes[label] for label in rows + columns)))
        return _Factor(y, order).ordered("".join(label for label in self.result if label in self.sizes))

    def _matrix(self, factor: _Factor, free: str, summed: str, is_right: bool) -> Any:
        """A factor as ``(batch, free, summed)``, the right one as ``(batch, summed, free)``.

        Its last axis stays last, so that whole rows are copied. If that leaves the matrix transposed, a Transpose of
        its two axes follows, which the runtime fuses into the product.
        """
        batch = factor.only(self.batch)
        free_last = factor.labels[-1] in free
        parts = (summed, free) if free_last else (free, summed)
        value = factor.ordered(batch + parts[0] + parts[1])
        value = _opset().Reshape(value, _numbers(*[0] * len(batch), *(self.length(part) for part in parts)))
        if free_last == is_right:
            return value
        axes = range(len(batch))
        return _opset().Transpose(value, perm=[*axes, len(batch) + 1, len(batch)])


def _opset() -> Any:
    from onnxscript import opset18

    return opset18


def _numbers(*values: int) -> Any:
    return _opset().Constant(value_ints=[int(value) for value in values])
