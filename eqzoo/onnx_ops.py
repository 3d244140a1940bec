"""Operators written for ONNX Runtime, where the exporter's own way of writing them is slow there.

A product of tensors becomes a MatMul or a few multiplications instead of an Einsum, and the neighbourhoods of all
pixels become slices, which copy whole rows, instead of a Gather that picks numbers one by one.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

__all__ = ["translations"]

# A sum over so few products is written out, where the matrices of a MatMul would have so few entries that its work on
# each of them outweighs the multiplications.
_SHORT_SUM = 8
_TINY_MATRIX = 64
_END = 2**63 - 1
_BOUNDS = "eqzoo.bounds"  # of a Slice: start, end and step for each axis


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The exporter's ``custom_translation_table``: how to write products, neighbourhoods and softmax."""
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
    """A slice; one of a slice along another axis becomes one of both axes, without a copy between."""
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
    """Softmax along the last axis; along another one in steps, for which the runtime would turn the tensor twice."""
    op = _opset()
    axis = dim % len(x.shape)
    if axis == len(x.shape) - 1:
        return op.Softmax(x, axis=-1)
    _, powers, total = _exponentials(x, axis)
    return op.Div(powers, total)


def _logsumexp(x: Any, dim: Sequence[int], keepdim: bool = False) -> Any:
    """``max + log Σ exp(x − max)`` of finite scores, in steps that a softmax of the same scores shares."""
    op = _opset()
    (axis,) = (d % len(x.shape) for d in dim)
    largest, _, total = _exponentials(x, axis)
    y = op.Add(op.Log(total), largest)
    return y if keepdim else op.Squeeze(y, _numbers(axis))


def _exponentials(x: Any, axis: int) -> tuple[Any, Any, Any]:
    """The largest score along an axis, the exponentials of the scores less that, and their sum."""
    op = _opset()
    largest = op.ReduceMax(x, _numbers(axis), keepdims=1)
    powers = op.Exp(op.Sub(x, largest))
    return largest, powers, op.ReduceSum(powers, _numbers(axis), keepdims=1)


def _addcmul(x: Any, first: Any, second: Any, value: float = 1.0) -> Any:
    """``x + value · first · second``, without a product where the value is 1."""
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
    """The neighbourhoods ``(B, C·k·k, places)`` of planes: shifted along the width, then along the height."""
    op = _opset()
    channels, *sides = x.shape[1:]
    y = op.Pad(x, _numbers(0, 0, *padding, 0, 0, *padding))
    for axis in (1, 0):
        # The taps become an axis behind the channels: columns first, and then rows before them.
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
    """A product of two tensors, summed over labels that they share; any other equation stays an Einsum."""
    del path  # two factors have one order
    product = _Product.of(equation.replace(" ", ""), tensors)
    if product is None:
        return _opset().Einsum(*tensors, equation=equation)
    y = product.written_out() if product.is_tiny else product.as_matrices()
    missing = [axis for axis, label in enumerate(product.result) if label not in product.sizes]
    return _opset().Unsqueeze(y, _numbers(*missing)) if missing else y


@dataclass(frozen=True)
class _Factor:
    """A tensor whose axes have one-letter labels, none of them of length 1."""

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
    """Two factors, the labels of the result in order, those that are summed over, and the length of every axis."""

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
        places = [[result.index(label) for label in f.labels if label not in o.labels] for f, o in _pairs(left, right)]
        if places[1] and (not places[0] or places[1][0] < places[0][0]):
            left, right = right, left
        return _Product(left, right, result, summed, sizes)

    @property
    def batch(self) -> str:
        """The labels that both factors have, after the batch of pictures, which broadcasts if one lacks it."""
        symbols = [label for label in self.result if not isinstance(self.sizes.get(label, 1), int)]
        both = self.left.only(self.right.only(self.result))
        return "".join([*symbols, *(label for label in both if label not in symbols)])

    def free(self, factor: _Factor) -> str:
        """The labels of the result that this factor alone has."""
        return "".join(label for label in factor.only(self.result) if label not in self.batch)

    def length(self, labels: Iterable[str]) -> int:
        """The number of entries that the labels span."""
        return math.prod(self.sizes[label] for label in labels)

    @property
    def is_tiny(self) -> bool:
        """Whether the matrices of a product would be too small to be worth one."""
        entries = self.length(self.free(self.left) + self.free(self.right))
        is_short = len(self.summed) == 1 and self.length(self.summed) <= _SHORT_SUM
        return not self.summed or (is_short and entries <= _TINY_MATRIX)

    def written_out(self) -> Any:
        """``Σ_k a_k b_k`` as products and sums of tensors that are laid out as the result."""
        op = _opset()
        split = [self._slices(factor) for factor in (self.left, self.right)]
        return reduce(op.Add, [op.Mul(a, b) for a, b in zip(*split, strict=True)])

    def _slices(self, factor: _Factor) -> list[Any]:
        op = _opset()
        order = self.summed + factor.only(self.result)
        value, count = factor.ordered(order), self.length(self.summed)
        present = [label for label in self.result if label in self.sizes]
        gaps = [axis for axis, label in enumerate(present) if label not in factor.labels]
        parts = [op.Gather(value, _number(k), axis=0) for k in range(count)] if self.summed else [value]
        return [op.Unsqueeze(part, _numbers(*gaps)) if gaps else part for part in parts]

    def as_matrices(self) -> Any:
        """One MatMul over the batch, of matrices that have the free labels as rows and columns."""
        op = _opset()
        rows, columns = self.free(self.left), self.free(self.right)
        # The longer factor keeps the order of what is summed over.
        longer = max(
            self.left, self.right, key=lambda f: self.length(label for label in f.labels if label in rows + columns)
        )
        summed = longer.only(label for label in longer.labels if label in self.summed)
        y = op.MatMul(self._matrix(self.left, rows, summed, False), self._matrix(self.right, columns, summed, True))
        order = self.batch + rows + columns
        y = op.Reshape(y, _numbers(*[0] * len(self.batch), *(self.sizes[label] for label in rows + columns)))
        return _Factor(y, order).ordered("".join(label for label in self.result if label in self.sizes))

    def _matrix(self, factor: _Factor, free: str, summed: str, is_right: bool) -> Any:
        """A factor as ``(batch, free, summed)``, or if it is the right one as ``(batch, summed, free)``.

        It is laid out so that its last axis stays the last one, which copies rows; that may leave a swap of the two
        axes of the matrix, which the runtime makes part of the product.
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


def _pairs(left: _Factor, right: _Factor) -> tuple[tuple[_Factor, _Factor], tuple[_Factor, _Factor]]:
    return (left, right), (right, left)


def _opset() -> Any:
    from onnxscript import opset18

    return opset18


def _numbers(*values: int) -> Any:
    return _opset().Constant(value_ints=[int(value) for value in values])


def _number(value: int) -> Any:
    return _opset().Constant(value_int=int(value))
