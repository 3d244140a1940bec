"""Export to ONNX and torch programs, with each file checked against its network."""

from .onnx_file import OnnxFile
from .onnx_network import OnnxNetwork
from .programs import ExportError, ExportReport, export_onnx, export_pt2, metadata, weights_sha256
from .quantization import QuantizationReport, quantize_onnx

__all__ = [
    "ExportError",
    "ExportReport",
    "OnnxFile",
    "OnnxNetwork",
    "QuantizationReport",
    "export_onnx",
    "export_pt2",
    "metadata",
    "quantize_onnx",
    "weights_sha256",
]
