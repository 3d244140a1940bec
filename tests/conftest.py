"""Fixtures of all tests: float64, a fixed seed, short measurements, data sets, and the table of networks."""

import contextlib
import csv
import functools
import gzip
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

from eqzoo.analysis import throughput
from eqzoo.data import Split
from eqzoo.groups import Group
from tests.digits import drawn_digits

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: one thread each, and in what they start
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
# Every network and data set, its group and parameter count, and the figures of its paper, if it has one.
with (ROOT / "tests" / "models" / "networks.csv").open() as file:
    NETWORKS = list(csv.DictReader(file))


def pytest_make_parametrize_id(val):
    """The name of a group; others have pytest's own names."""
    return val.name if isinstance(val, Group) else None


def slow(names, these):
    """The names as test parameters, with ``these`` marked slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in these else name for name in names]


@contextlib.contextmanager
def threads(count):
    """Lets torch and the kernels use some threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def kept_numbers(function, *args):
    """How many numbers autograd keeps of a call, each storage once."""
    storages = {}

    def pack(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        assert function(*args).requires_grad
    return sum(storages.values())


@pytest.fixture(autouse=True)
def _float64_and_seed():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session", autouse=True)
def _short_measurements():
    """Networks are timed for a hundredth of a second where results of a training are written, not for three."""
    try:
        from eqzoo.finetuning import write
    except ImportError:  # without the extra `train`, tests of layers and networks run
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "throughput", functools.partial(throughput, min_seconds=1e-2))
        yield


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """``made_once(name, make)``: a path that all workers share, which the first to ask lets ``make(path)`` write."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def get(name, make):
        path = root / name
        with FileLock(root / f"{name}.lock"):
            if not path.exists():
                part = root / f"{name}.part"
                shutil.rmtree(part, ignore_errors=True)  # of a worker that was killed
                make(part)
                part.rename(path)
        return path

    return get


@pytest.fixture(scope="session")
def mnist_dir(made_once):
    """A data folder that contains MNIST."""
    packed = SHARED / "data" / "MNIST" / "raw"
    if not packed.is_dir():
        pytest.skip("no MNIST beside the checkout")

    def unpack(folder):
        raw = folder / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for file in packed.glob("*.gz"):
            (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))

    return made_once("mnist", unpack)


@pytest.fixture(scope="session")
def real_images_dir(made_once):
    """A data folder that contains EuroSAT and Chula RBC-12."""
    packed = SHARED / "data"
    if not (packed / "eurosat").is_dir() or not (packed / "chula_rbc12").is_dir():
        pytest.skip("no EuroSAT and Chula RBC-12 beside the checkout")

    def unpack(folder):
        for file in (packed / "eurosat").glob("*.zip"):
            with zipfile.ZipFile(file) as archive:
                archive.extractall(folder / "eurosat" / "2750")
        (folder / "chula_rbc12").symlink_to(packed / "chula_rbc12")

    return made_once("real_images", unpack)


@pytest.fixture(scope="session")
def digits():
    """200 digits drawn by code, rotated by any angle, in the format of rotated MNIST."""
    return drawn_digits(200)


@pytest.fixture(scope="session")
def cifar10_test():
    """The test split of CIFAR-10."""
    folder = SHARED / "data" / "cifar10"
    if not folder.is_dir():
        pytest.skip("no CIFAR-10 beside the checkout")
    sheet = torch.from_numpy(np.asarray(Image.open(folder / "test.webp").convert("RGB")).copy())
    tiles = sheet.unflatten(0, (-1, 32)).unflatten(2, (-1, 32)).permute(0, 2, 4, 1, 3).flatten(0, 1)
    return Split(tiles.contiguous(), torch.from_numpy(np.load(folder / "labels.npz")["test"]).long())
