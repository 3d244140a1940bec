"""Chula RBC-12: red blood cells, cut out of micrographs of blood smears around their labeled centers.

The data set as its authors publish it is two folders: ``Dataset/<n>.jpg``, micrographs of 640 x 480 pixels, and
``Label/<n>.txt``, a line ``x y class`` for each cell, with its center in pixels from the top left.

References:
    Red Blood Cell Segmentation with Overlapping Cell Separation and Classification on Imbalanced Dataset
    (Naruenatthanaset, Chalidabhongse, Palasuwan, Anantrasirichai and Palasuwan, 2021)
    https://arxiv.org/abs/2012.01321, https://github.com/Chula-PIC-Lab/Chula-RBC-12-Dataset
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from .splits import Split

SIDE = 80  # pixels of a crop; a cell is about 50 wide
RUN = 10  # consecutive micrographs that stay together: neighbors may be of one slide
SPLIT_SEED = 16_492  # of 0 to 19,999 the one whose parts are nearest to 60 : 20 : 20 in every class
_SHARES = (("train", 0.6), ("valid", 0.8), ("test", 1.0))
# Left out: 10, cells that the authors could not name, and 12, which one stain alone has.
_NAMES = {
    0: "normal cell",
    1: "macrocyte",
    2: "microcyte",
    3: "spherocyte",
    4: "target cell",
    5: "stomatocyte",
    6: "ovalocyte",
    7: "teardrop",
    8: "burr cell",
    9: "schistocyte",
    11: "hypochromia",
}
_LEFT_OUT = (10, 12)
_LABELS = {number: label for label, number in enumerate(_NAMES)}
CELL_CLASSES = tuple(_NAMES.values())


def chula_rbc12(data_dir: str | os.PathLike[str]) -> dict[str, Split]:
    """The cells in three parts, 60 : 20 : 20 by micrographs.

    Micrographs ``10 r + 1`` to ``10 r + 10`` are a run and go to one part: with u, the first 8 hexadecimal digits of
    the SHA-256 of ``"16492/<r>"`` over 2³², to train if u < 0.6, to valid if u < 0.8, else to test. So the part of one
    depends on its number alone, whatever others a folder has.

    A cell is a crop of 80 x 80 pixels around its center; beyond the edge of the micrograph its reflection continues it.
    Classes 10 (not named by the authors) and 12 (seen in one stain alone) are left out, and of micrographs that are the
    same byte for byte the first is taken.

    Args:
        data_dir: The folder with ``Dataset`` and ``Label``, or the one that holds it as ``chula_rbc12``.

    Returns:
        ``train``, ``valid`` and ``test``: images ``(n, 3, 80, 80)`` uint8, labels ``(n,)`` and the names of 11 classes.

    Raises:
        FileNotFoundError: If there is no such folder, or a micrograph or its labels are missing.
        ValueError: If a file cannot be read or says something else.
    """
    cells, micrographs = _read(data_dir)
    parts = np.array([_part(number) for number in micrographs.tolist()])
    return {name: cells[torch.from_numpy(parts == name)] for name, _ in _SHARES}


def _part(micrograph: int) -> str:
    digest = hashlib.sha256(f"{SPLIT_SEED}/{(micrograph - 1) // RUN}".encode()).hexdigest()
    place = int(digest[:8], 16) / 2**32
    return next(name for name, end in _SHARES if place < end)


def _read(data_dir: str | os.PathLike[str]) -> tuple[Split, torch.Tensor]:
    """The cells, and the number of each one's micrograph."""
    folder = Path(data_dir)
    folder = folder / "chula_rbc12" if (folder / "chula_rbc12").is_dir() else folder
    images = {int(path.stem): path for path in (folder / "Dataset").glob("*.jpg") if path.stem.isdigit()}
    if not images:
        raise FileNotFoundError(
            f"no Chula RBC-12 in {folder}: its folders Dataset, of <number>.jpg, and Label, of <number>.txt, are at "
            "https://github.com/Chula-PIC-Lab/Chula-RBC-12-Dataset"
        )
    seen: set[bytes] = set()
    chosen = []
    for number, path in sorted(images.items()):
        digest = hashlib.sha256(path.read_bytes()).digest()
        if digest not in seen:
            chosen.append(number)
        seen.add(digest)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda number: _cells(images[number], folder / "Label" / f"{number}.txt"), chosen))
    crops = torch.from_numpy(np.concatenate([crops for crops, _ in found])).permute(0, 3, 1, 2).contiguous()
    labels = torch.tensor([label for _, labels in found for label in labels], dtype=torch.int64)
    numbers = [n for n, (_, labels) in zip(chosen, found, strict=True) for _ in labels]
    return Split(crops, labels, CELL_CLASSES), torch.tensor(numbers, dtype=torch.int64)


def _cells(image: Path, text: Path) -> tuple[np.ndarray[Any, Any], list[int]]:
    """The crops of a micrograph, ``(n, 80, 80, 3)`` uint8, and their labels."""
    with Image.open(image) as file:
        micrograph = np.asarray(file.convert("RGB"))
    half = SIDE // 2
    around = np.pad(micrograph, ((half, half), (half, half), (0, 0)), mode="reflect")
    crops, labels = [np.empty((0, SIDE, SIDE, 3), np.uint8)], []
    for x, y, number in np.loadtxt(text, int, ndmin=2).tolist():
        if number not in _LEFT_OUT:
            crops.append(around[None, y : y + SIDE, x : x + SIDE])
            labels.append(_LABELS[number])
    return np.concatenate(crops), labels
