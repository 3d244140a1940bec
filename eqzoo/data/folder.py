"""Folders of pictures: ``train``, ``val`` and ``test``, with a sub-folder for each class."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from .pictures import load_picture, preprocess
from .split import AnySplit, Split, Streamed

__all__ = ["MEMORY_LIMIT", "image_folder"]

MEMORY_LIMIT = 2**31  # bytes of a split that is still held in memory
_NAMES = {"train": ("train",), "valid": ("val", "valid", "validation"), "test": ("test",)}


def image_folder(path: Path, input_size: tuple[int, int, int]) -> dict[str, AnySplit]:
    """Reads a folder with a sub-folder for each split, and in it one for each class.

    The classes are the names of the sub-folders of ``train``, in order. ``val`` may be missing (then validation
    pictures are held out of the training ones) and ``test`` too. Pictures of any size and format are scaled and cropped
    to the network's size, alike from every side.

    Args:
        path: The folder.
        input_size: Channels (1 or 3), height and width.

    Returns:
        The splits; parts of more than 2 GiB are streamed.

    Raises:
        FileNotFoundError: If there is no ``train`` folder.
        ValueError: If there are no classes, a class has no pictures, a split has other classes, or a picture cannot be
            read; pictures that are streamed are opened for this, but not decoded.
    """
    folders = {name: _first(path, names) for name, names in _NAMES.items()}
    if folders["train"] is None:
        raise FileNotFoundError(f"{path} has no folder train; the layout is train/<class>/<picture>, val/..., test/...")
    classes = _classes(folders["train"])
    return {name: _read(folder, classes, input_size) for name, folder in folders.items() if folder}


def _first(path: Path, names: tuple[str, ...]) -> Path | None:
    return next((path / name for name in names if (path / name).is_dir()), None)


def _classes(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")))


def _read(folder: Path, classes: tuple[str, ...], input_size: tuple[int, int, int]) -> AnySplit:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    if not classes or _classes(folder) != classes:
        raise ValueError(
            f"{folder} holds the class folders {list(_classes(folder))}; needed is one for each class, the same in "
            f"every split, as in train: {list(classes)}"
        )
    files, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in IMG_EXTENSIONS and p.is_file())
        if not found:
            raise ValueError(f"the class folder {folder / name} holds no pictures ({', '.join(IMG_EXTENSIONS)})")
        files += found
        labels += [label] * len(found)
    targets = torch.tensor(labels)
    reader = _Reader(files, input_size)
    with ThreadPoolExecutor() as pool:
        if len(files) * torch.Size(input_size).numel() <= MEMORY_LIMIT:
            return Split(torch.stack(list(pool.map(reader, range(len(files))))), targets, classes)
        list(pool.map(_open, files))
    return Streamed(reader, torch.arange(len(files)), targets, input_size, classes)


class _Reader:
    """Reads picture i of a list at a size."""

    def __init__(self, files: list[Path], input_size: tuple[int, int, int]) -> None:
        self.files = files
        self.input_size = input_size

    def __call__(self, index: int) -> Tensor:
        channels, *size = self.input_size
        picture = preprocess(load_picture(self.files[index], channels), (size[0], size[1]))
        return picture.round().clamp(0, 255).to(torch.uint8)


def _open(path: Path) -> None:
    """Raises ValueError unless the file begins as a picture does."""
    try:
        with Image.open(path):
            pass
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{path} is not a picture that Pillow can read: {error}") from error
