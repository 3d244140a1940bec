"""What needs a GPU: skipped without one, and where Triton interprets its kernels on the CPU."""

import os

import pytest
import torch


def pytest_collection_modifyitems(items):
    reason = None
    if not torch.cuda.is_available():
        reason = "no CUDA GPU here"
    elif os.environ.get("TRITON_INTERPRET") == "1":
        reason = "the interpreter is on: run TRITON_INTERPRET=0 pytest tests/gpu"
    for item in items:
        if reason and "/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _no_tf32(monkeypatch):
    """Products of float32 in float32: TF32, torch's default in convolutions, has 10 bits behind the point."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
