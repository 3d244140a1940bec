"""Group convolutions in ONNX files through the irreps of the group, in standard operators.

An output field is ``Φ(h, x) = Σ_{g,e} ψ(h⁻¹g, e) f(g, x + R_g e)``, over poses g and taps e. So the numbers under a
filter are, for each field and tap, a function on the group, and the Fourier transform over the group turns the sum over
g into a product for each irrep, with 12 of 64 multiplications for p4m and 6 of 16 for p4. The products' matrices, as
many numbers, take the place of the filters.
"""

import hashlib
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..groups import Group, orbit_array
from .onnx_filters import filters_of, replace_all

# From how many fields convolutions are faster in ONNX Runtime, with one image and with 16, for each order of a group.
_LEAST_FIELDS = {8: 32, 4: 128}
_Array = np.ndarray[Any, Any]


class _Irreps(NamedTuple):
    """The real irreps of a group, by their components.

    Args:
        forward: ``(|H|, |H|)``, from poses to components; those of an irrep lie side by side.
        inverse: ``(|H|, |H|)``, from components to poses.
        parts: Of each block of components that are transformed alike, ``ρ(g)``: ``(|H|, d, d)``.
    """

    forward: _Array
    inverse: _Array
    parts: tuple[_Array, ...]


@cache
def _irreps(group: Group) -> _Irreps:
    """The irreps of a group of rotations by multiples of 90°, and reflections."""
    turns = [group.quarter_rotations(g) for g in group.elements]
    quarters, reflected = (np.array(each, int) for each in zip(*turns, strict=True))
    signs = {tuple((-1) ** (a * reflected + b * (quarters * group.rotations // 4))) for a in (0, 1) for b in (0, 1)}
    parts = [np.array(each, float).reshape(-1, 1, 1) for each in sorted(signs, reverse=True)]
    if group.rotations == 4:
        parts += [np.array([group.matrix_rows(g) for g in group.elements])] * (2 if group.reflections else 1)
    inverses = [group.inverse(g) for g in group.elements]
    forward, inverse, column = [], [], 0
    for part in parts:
        size = part.shape[1]
        forward += [part[inverses][:, k, column] for k in range(size)]
        inverse += [size * part[:, column, k] / group.order for k in range(size)]
        column += size > 1
    return _Irreps(np.array(forward), np.array(inverse).T, tuple(parts))


def through_irreps(model: Any, group: Group) -> int:
    """Writes the group convolutions of many fields through irreps, in place, where that is faster in ONNX Runtime.

    Args:
        model: The ONNX model, for images of one size.
        group: The group of its network.

    Returns:
        The number of these convolutions.
    """
    from onnx import helper, numpy_helper, shape_inference

    if not group.on_grid or group.order not in _LEAST_FIELDS:
        return 0
    graph = shape_inference.infer_shapes(model).graph
    sides = {
        value.name: tuple(side.dim_value for side in value.type.tensor_type.shape.dim)[2:]
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes, count, held = list[Any](), 0, dict[tuple[Any, ...], str]()
    for node in model.graph.node:
        made = None
        if node.op_type == "Conv" and constants.keys() >= set(node.input[1:]):
            given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
            bank, *bias = (numpy_helper.to_array(constants[name]) for name in node.input[1:])
            window = _window(given, bank, *(sides.get(name, ()) for name in (node.input[0], node.output[0])))
            if window:
                made = _convolution(_Nodes(node.output[0], held), node.input[0], bank, bias, window, group)
        if made:
            count += 1
            constants |= {tensor.name: tensor for tensor in made.constants}
        nodes += made.nodes if made else [node]
    if not count:
        return 0
    used = {name for node in nodes for name in node.input}
    replace_all(model.graph.initializer, [tensor for name, tensor in constants.items() if name in used])
    replace_all(model.graph.node, nodes)
    return count


class _Window(NamedTuple):
    """The pixels that a convolution reads: the taps of a k x k filter at each place of the output."""

    kernel: int
    stride: int
    padding: int
    dilation: int
    sides: tuple[int, ...]  # of the field
    outs: tuple[int, ...]  # of the output

    def taps(self, group: Group) -> _Array:
        """The tap ``R_g e``, ``(|H|, k²)``."""
        return orbit_array(group, self.kernel, "trivial").argsort(1)

    def pixels(self, group: Group) -> _Array:
        """Where pose g reads tap ``R_g e``: a pixel of all poses in turn, or their number, outside of the image.

        Returns:
            ``(|H|, height', width', k²)``.
        """
        height, width = self.sides
        taps = self.taps(group)[:, None, None]
        y, x = np.ogrid[: self.outs[0], : self.outs[1]]
        y = self.stride * y[..., None] + self.dilation * (taps // self.kernel) - self.padding
        x = self.stride * x[..., None] + self.dilation * (taps % self.kernel) - self.padding
        pose = np.arange(group.order).reshape(-1, 1, 1, 1)
        is_inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        return np.where(is_inside, (pose * height + y) * width + x, group.order * height * width)


def _window(given: dict[str, Any], bank: _Array, sides: tuple[int, ...], outs: tuple[int, ...]) -> _Window | None:
    """The window of a convolution with these attributes; None if it is grouped, not square, or of unknown sides."""
    attributes = [given.get("strides", [1]), given.get("pads", [0]), given.get("dilations", [1])]
    if given.get("group", 1) > 1 or given.get("auto_pad", b"NOTSET") != b"NOTSET" or bank.ndim != 4:
        return None
    if not len(sides) == len(outs) == 2 or not all((*sides, *outs)) or any(len(set(each)) > 1 for each in attributes):
        return None
    stride, padding, dilation = (each[0] for each in attributes)
    return _Window(bank.shape[3], stride, padding, dilation, sides, outs)


class _Nodes:
    """Nodes and constants that compute the output of a node, which they replace.

    Args:
        name: The output.
        held: The names of constants that the file holds, by their content.
    """

    def __init__(self, name: str, held: dict[tuple[Any, ...], str]) -> None:
        self.name, self.held = name, held
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def add(self, operator: str, *inputs: str | _Array, outputs: int = 1, **given: Any) -> list[str]:
        """Appends a node, of whose inputs arrays are constants; its outputs."""
        from onnx import helper

        names = [each if isinstance(each, str) else self.constant(each) for each in inputs]
        found = [f"irreps/{self.name}/{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(operator, names, found, name=f"{found[0]}_{operator}", **given))
        return found

    def constant(self, values: _Array) -> str:
        from onnx import numpy_helper

        content = (values.dtype.str, values.shape, hashlib.sha256(values.tobytes()).digest())
        if content not in self.held:
            self.held[content] = f"irreps/constant_{len(self.held)}"
            self.constants.append(numpy_helper.from_array(values, self.held[content]))
        return self.held[content]

    def reshape(self, x: str, *shape: int) -> str:
        return self.add("Reshape", x, np.array(shape))[0]

    def transpose(self, x: str, *axes: int) -> str:
        return self.add("Transpose", x, perm=axes)[0]

    def matrices(self, products: _Array, group: Group) -> list[str]:
        """The matrices of an irrep, one for each component; a complex product holds its two parts once."""
        if len(products) == 1 or group.reflections:
            return [self.constant(each) for each in products]
        real, imaginary = map(self.constant, np.split(products[0], 2, axis=1))
        pairs = ((real, imaginary), (self.add("Neg", imaginary)[0], real))
        return [self.add("Concat", *pair, axis=1)[0] for pair in pairs]


def _convolution(
    made: _Nodes, field: str, bank: _Array, biases: list[_Array], window: _Window, group: Group
) -> _Nodes | None:
    """A convolution through irreps, or None where it is no group convolution of fields or has too few of them."""
    bias = biases[0] if biases else np.zeros(len(bank))
    order, dtype, taps = group.order, bank.dtype, window.taps(group)
    outs, fields = (planes // order for planes in bank.shape[:2])
    filters = filters_of(bank, group, "regular") if min(outs, fields) >= _LEAST_FIELDS[order] else None
    if filters is None or (bias.reshape(outs, order) != bias[::order, None]).any():
        return None
    forward, inverse, parts = _irreps(group)
    places, inner = window.outs[0] * window.outs[1], taps.shape[1] * fields
    # (C', C, |H|, k²): what pose j and tap R_j e of the filter are.
    filters = filters.reshape(outs, fields, order, -1)[:, :, np.arange(order)[:, None], taps].astype(np.float64)

    x = made.reshape(field, -1, fields, order * window.sides[0] * window.sides[1])
    x = made.transpose(x, 0, 2, 1)
    if window != (1, 1, 0, 1, window.sides, window.sides):
        (x,) = made.add("Pad", x, np.array([0, 0, 0, 0, 1, 0]))  # a row of zeros
        (x,) = made.add("Gather", x, window.pixels(group).reshape(-1).astype(np.int32), axis=1)
    (x,) = made.add("MatMul", forward.astype(dtype), made.reshape(x, -1, order, places * inner))
    split = made.add("Split", x, np.ones(order, np.int64), outputs=order, axis=1)
    components = [made.reshape(each, -1, inner) for each in split]
    found = []
    for part in parts:
        products = np.einsum("jak,ocje->kecao", part, filters).reshape(part.shape[1], inner, -1).astype(dtype)
        terms = [made.add("MatMul", components.pop(0), each)[0] for each in made.matrices(products, group)]
        found.append(terms[0] if len(terms) == 1 else made.add("Add", *terms)[0])
    if bias.any():
        (found[0],) = made.add("Add", found[0], (order * bias[::order]).astype(dtype))  # the first irrep is trivial
    (x,) = made.add("Concat", *found, axis=1)
    x = made.reshape(made.transpose(made.reshape(x, -1, places, order * outs), 0, 2, 1), -1, order, outs * places)
    (x,) = made.add("MatMul", inverse.astype(dtype), x)
    x = made.transpose(made.reshape(x, -1, order, outs, places), 0, 2, 1, 3)
    made.reshape(x, -1, outs * order, *window.outs)
    made.nodes[-1].output[0] = made.name
    return made
