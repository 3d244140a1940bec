"""EuroSAT: satellite tiles of ten kinds of land use, red, green and blue.

References:
    EuroSAT: A Novel Dataset and Deep Learning Benchmark for Land Use and Land Cover Classification
    (Helber, Bischke, Dengel and Borth, 2019), https://arxiv.org/abs/1709.00029
"""

import os
from pathlib import Path

import numpy as np
import torch

from .external import fetched
from .folder import image_folder
from .splits import DRAW_SEED, AnySplit

__all__ = ["EUROSAT_CLASSES", "eurosat"]

SIDE = 64  # pixels, 10 m each
SIZES = {  # the tiles of each class
    "AnnualCrop": 3_000,
    "Forest": 3_000,
    "HerbaceousVegetation": 3_000,
    "Highway": 2_500,
    "Industrial": 2_500,
    "Pasture": 2_000,
    "PermanentCrop": 2_500,
    "Residential": 3_000,
    "River": 2_500,
    "SeaLake": 3_000,
}
EUROSAT_CLASSES = tuple(SIZES)


def eurosat(data_dir: str | os.PathLike[str], download: bool = False) -> dict[str, AnySplit]:
    """The tiles in three parts, 60 : 20 : 20 of each class.

    There is no official split. Here the file names of a class, sorted as text, are permuted by
    ``numpy.random.RandomState(2016).permutation(n)``; the first 60 % are ``train``, the next 20 % ``valid`` and the
    rest ``test``, in the order of the file names again.

    Args:
        data_dir: The folder that holds ``eurosat/2750/<class>/*.jpg``, as torchvision lays it out.
        download: Whether torchvision may fetch what is missing.

    Returns:
        ``train``, ``valid`` and ``test``, images ``(n, 3, 64, 64)`` uint8.

    Raises:
        FileNotFoundError: If there is no such folder.
        OSError: If it cannot be downloaded.
        ValueError: If classes or images are missing or broken.
    """
    folder = Path(data_dir) / "eurosat" / "2750"
    if download and not folder.is_dir():
        from torchvision.datasets import EuroSAT

        with fetched("EuroSAT", folder):
            EuroSAT(str(data_dir), download=True)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no EuroSAT in {folder}: put its class folders there, name the folder that holds eurosat/2750 with "
            "--data-dir, or pass --download to fetch it"
        )
    found = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."))
    if found != EUROSAT_CLASSES:
        raise ValueError(
            f"{folder} holds the class folders {', '.join(found) or 'none'}; EuroSAT's are {', '.join(EUROSAT_CLASSES)}"
        )
    tiles = image_folder(folder, (3, SIDE, SIDE), flat=True)["train"]
    for name, size, count in zip(SIZES, SIZES.values(), tiles.labels.bincount().tolist(), strict=True):
        if count != size:
            raise ValueError(
                f"{folder / name} holds {count:,} images, and EuroSAT has {size:,} of this class, without which its "
                "parts are others; remove the folder, and unpack or download it again"
            )
    parts: dict[str, list[torch.Tensor]] = {"train": [], "valid": [], "test": []}
    for label in range(len(EUROSAT_CLASSES)):
        places = (tiles.labels == label).nonzero()[:, 0]  # in the order of the file names
        order = torch.from_numpy(np.random.RandomState(DRAW_SEED).permutation(len(places)))
        ends = round(0.6 * len(places)), round(0.8 * len(places))
        for name, chosen in zip(parts, order.tensor_split(ends), strict=True):
            parts[name].append(places[chosen])
    return {name: tiles[torch.cat(chosen).sort().values] for name, chosen in parts.items()}  # type: ignore[misc]
