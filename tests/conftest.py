"""All tests run in float64 and from a fixed seed."""

import gzip
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


@pytest.fixture(autouse=True)
def _float64_and_seed():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def mnist_dir(tmp_path_factory):
    """A data folder with MNIST in it."""
    packed = SHARED / "data" / "MNIST" / "raw"
    if not packed.is_dir():
        pytest.skip("no MNIST beside the checkout")
    raw = tmp_path_factory.mktemp("data") / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in packed.glob("*.gz"):
        (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    return raw.parents[1]
