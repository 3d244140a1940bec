"""Export to ONNX and torch programs, with each file checked against its network."""

from .onnx_file import OnnxFile
from .programs import ExportError, ExportReport, export_onnx, export_pt2, metadata, weights_sha256

__all__ = ["ExportError", "ExportReport", "OnnxFile", "export_onnx", "export_pt2", "metadata", "weights_sha256"]
