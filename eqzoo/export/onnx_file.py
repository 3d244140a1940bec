"""Writing and running ONNX files."""

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..groups import Group
from .onnx_filters import store_filters_once
from .onnx_irreps import through_irreps
from .onnx_translations import translations

_TYPES = {"tensor(float16)": torch.float16, "tensor(float)": torch.float32, "tensor(double)": torch.float64}


class OnnxFile:
    """A network in an ONNX file, run by ONNX Runtime: maps the single input to the first output.

    Args:
        path: The file.
        threads: The number of threads of ONNX Runtime; by default torch's.

    Raises:
        ImportError: If ONNX Runtime is not installed.
        FileNotFoundError: If there is no such file.
        ValueError: If ONNX Runtime cannot run the file, or it does not have a single floating-point input.
    """

    def __init__(self, path: str | Path, threads: int | None = None) -> None:
        need_onnx("onnxruntime")
        import onnxruntime

        if not Path(path).is_file():
            raise FileNotFoundError(f"no file at {path}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.log_severity_level = 3  # errors
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime has a class for each of its error codes
            raise ValueError(f"{path} is not an ONNX file that ONNX Runtime can run: {error}") from error
        inputs = self._session.get_inputs()
        if len(inputs) != 1 or inputs[0].type not in _TYPES:
            found = ", ".join(f"{each.name}: {each.type}" for each in inputs) or "no input: its outputs are constants"
            raise ValueError(f"{path} needs a single floating-point input, a batch of images; it has {found}")
        self._name = inputs[0].name
        self.dtype = _TYPES[inputs[0].type]
        # A dynamic side is None.
        self.input_shape = tuple(side if isinstance(side, int) else None for side in inputs[0].shape)
        self.metadata: dict[str, str] = self._session.get_modelmeta().custom_metadata_map

    def __call__(self, x: Tensor) -> Tensor:
        """The first output for a batch of images."""
        return self.run(x)[0]

    def run(self, x: Tensor) -> list[Tensor]:
        """All outputs for a batch of images."""
        found = self._session.run(None, {self._name: x.detach().to("cpu", self.dtype).contiguous().numpy()})
        return [torch.from_numpy(output) for output in found]


def write_onnx(
    program: torch.export.ExportedProgram, path: Path, opset: int, about: dict[str, str], irreps: bool
) -> Counter[str]:
    """Writes a program as a single ONNX file and runs the ONNX checker on it.

    Args:
        program: The program, from images to logits, with a dynamic batch size.
        path: The file.
        opset: The opset version.
        about: The metadata of the file.
        irreps: Whether group convolutions of many fields are written through irreps.

    Returns:
        The number of nodes of each operator, without those that ONNX Runtime computes as it loads the file.

    Raises:
        ValueError: If the exporter wrote another opset or a fixed batch size.
    """
    import onnx

    with quiet():
        written = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            input_names=["image"],
            output_names=["logits"],
            optimize=False,
            verbose=False,
            custom_translation_table=translations(),
        )
        assert written is not None
        _tidy(written.model, about)
        written.save(path, external_data=False)
    proto = onnx.load(path)
    group = Group.from_name(about["group"])
    if irreps and (count := through_irreps(proto, group)):
        proto.metadata_props.add(key="irreps", value=str(count))
    store_filters_once(proto, group)
    path.write_bytes(proto.SerializeToString())
    onnx.checker.check_model(proto, full_check=True)
    have = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    batch = proto.graph.input[0].type.tensor_type.shape.dim[0]
    if have != opset or not batch.dim_param:
        raise ValueError(
            f"opset {opset} and a dynamic batch were requested, the exporter wrote opset {have} and {batch}"
        )
    return _operators(proto.graph)


def _operators(graph: Any) -> Counter[str]:
    """The number of nodes of each operator, without those that are computed from constants alone."""
    constants, found = {tensor.name for tensor in graph.initializer}, Counter[str]()
    for node in graph.node:
        if constants.issuperset(node.input):
            constants |= set(node.output)
        else:
            found[node.op_type] += 1
    return found


def need_onnx(*packages: str) -> None:
    """Raises ImportError, naming the extra to install, if a package is missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ImportError(f'ONNX files need {", ".join(missing)}: pip install "eqzoo[export]"')


def _tidy(model: Any, about: dict[str, str]) -> None:
    """Folds constants, removes unused nodes and traces of the machine, and sets the metadata, in place.

    The exporter's own optimizer tries all its rules on all nodes, which takes minutes for a large graph.
    """
    import onnx_ir.passes.common as common
    import onnxscript.optimizer
    import onnxscript.rewriter
    from onnxscript.rewriter.rules import common as rules

    onnxscript.optimizer.fold_constants(model)
    # Replaces shapes that are computed from the batch size by constants with one -1, where all other sides are known.
    onnxscript.rewriter.rewrite(model, [rules.materialize_reshape_shape_rule, rules.reshape_reshape_rule])
    for step in (
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedOpsetsPass(),
        common.ClearMetadataAndDocStringPass(),
    ):
        step(model)
    model.producer_name = "eqzoo"
    model.producer_version = about["eqzoo_version"]
    model.metadata_props.clear()
    model.metadata_props.update(about)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what torch's exporter and ONNX Runtime's quantizer log, warn of and print."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
