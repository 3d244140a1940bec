"""Filters of equivariant convolutions in ONNX files: stored once, and copied to all poses when the file is loaded.

A convolution's filter bank is the orbit of its filters (see `eqzoo.groups.orbit_array`). A file holds the filters and
nodes Gather and Reshape of constants, which ONNX Runtime computes once, as it loads the file.
"""

from typing import Any

import numpy as np

from ..groups import Field, Group, orbit_array

_FIELDS: tuple[Field, ...] = ("regular", "trivial")


def store_filters_once(model: Any, group: Group) -> None:
    """Replaces filter banks that are orbits, bit for bit, by their filters, where that halves them; in place.

    Args:
        model: The ONNX model.
        group: The group of its network.
    """
    from onnx import helper, numpy_helper

    graph = model.graph
    nodes, kept = [], []
    tables: dict[str, np.ndarray[Any, Any]] = {}
    names: dict[bytes, str] = {}
    for tensor in graph.initializer:
        bank = numpy_helper.to_array(tensor)
        found = _filters(bank, group) if bank.ndim == 4 and group.on_grid else None
        if found is None or 2 * sum(each.nbytes for each in found) > bank.nbytes:
            kept.append(tensor)
            continue
        filters, index = found
        name, table = tensor.name, names.setdefault(index.tobytes(), f"orbit_{group.name}_{len(names)}")
        tables |= {table: index, f"{name}_shape": np.array(bank.shape)}
        kept.append(numpy_helper.from_array(filters, f"{name}_once"))
        nodes += [
            helper.make_node("Gather", [f"{name}_once", table], [f"{name}_copies"], name=f"{name}_copies", axis=1),
            helper.make_node("Reshape", [f"{name}_copies", f"{name}_shape"], [name], name=f"{name}_bank"),
        ]
    kept += [numpy_helper.from_array(values, name) for name, values in tables.items()]
    replace_all(graph.initializer, kept)
    replace_all(graph.node, [*nodes, *graph.node])


def expand_filters(model: Any) -> None:
    """Undoes `store_filters_once`, in place, for tools that take filter banks as constants, such as quantizers."""
    from onnx import helper, numpy_helper

    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        if node.op_type not in ("Gather", "Reshape") or not constants.keys() >= set(node.input):
            nodes.append(node)
            continue
        given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        values, where = (numpy_helper.to_array(constants[name]) for name in node.input)
        found = values.take(where, given.get("axis", 0)) if node.op_type == "Gather" else values.reshape(where)
        constants[node.output[0]] = numpy_helper.from_array(found, node.output[0])
    used = {name for node in nodes for name in node.input} | {output.name for output in graph.output}
    replace_all(graph.initializer, [tensor for name, tensor in constants.items() if name in used])
    replace_all(graph.node, nodes)


def _filters(bank: np.ndarray[Any, Any], group: Group) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """The filters of a bank ``(C'·|H|, planes, k, k)`` and where its copies take them from, or None if it is no orbit.

    Returns:
        ``(C', m)`` and ``(|H|, m)``, for the m numbers of a filter.
    """
    for field in _FIELDS:
        filters = filters_of(bank, group, field)
        if filters is not None:
            index = orbit_array(group, bank.shape[2], field)
            places = index.shape[1] * np.arange(filters.shape[1])[:, None] + index[:, None]
            return filters.reshape(len(filters), -1), places.reshape(group.order, -1).astype(np.int32)
    return None


def filters_of(bank: np.ndarray[Any, Any], group: Group, field: Field) -> np.ndarray[Any, Any] | None:
    """The filters ``(C', C, m)`` of a bank, of m numbers for each field, or None if it is not their orbit."""
    out_planes, in_planes, side, other = bank.shape
    if side != other or out_planes % group.order:
        return None
    index = orbit_array(group, side, field)
    if in_planes * side * side % index.shape[1]:
        return None
    rows = bank.reshape(out_planes // group.order, group.order, -1, index.shape[1])
    filters = np.ascontiguousarray(rows[:, 0])  # the first element is the identity
    return filters if np.array_equal(filters[:, :, index].swapaxes(1, 2), rows) else None


def replace_all(repeated: Any, values: list[Any]) -> None:
    """Replaces the messages of a repeated field."""
    del repeated[:]
    repeated.extend(values)
