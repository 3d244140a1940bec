"""Folders of pictures: a sub-folder for each class, and around them ``train``, ``val`` and ``test`` or nothing."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from PIL import Image
from torch import Tensor

from .pictures import load_picture, preprocess, says_grey
from .split import AnySplit, Split, Streamed

__all__ = ["MEMORY_LIMIT", "folder_channels", "image_folder"]

T = TypeVar("T")
MEMORY_LIMIT = 2**31  # bytes of a split that is still held in memory
SHOWN = 10  # how many broken pictures an error names
_NAMES = {"train": ("train",), "valid": ("val", "valid", "validation"), "test": ("test",)}


def image_folder(path: Path, input_size: tuple[int, int, int], flat: bool = False) -> dict[str, AnySplit]:
    """Reads a folder with a sub-folder for each split, and in it one for each class.

    The classes are the names of the sub-folders of ``train``, in order. ``val`` may be missing (then validation
    pictures are held out of the training ones) and ``test`` too. Pictures of any size and format are scaled and cropped
    to the network's size, alike from every side.

    Args:
        path: The folder.
        input_size: Channels (1, 3 or 4), height and width.
        flat: Whether a folder without ``train`` may hold the class folders itself; all its pictures are then
            ``train``.

    Returns:
        The splits; parts of more than 2 GiB are streamed.

    Raises:
        FileNotFoundError: If there is no ``train`` folder.
        ValueError: If there are no classes, a class has no pictures, a split has other classes, or pictures cannot be
            read; pictures that are streamed are opened for this, but not decoded.
    """
    folders = {name: _first(path, names) for name, names in _NAMES.items()}
    if folders["train"] is None and flat and _classes(path):
        folders = {"train": path}
    if folders["train"] is None:
        alone = " or, without train, <class>/<picture>" if flat else ""
        raise FileNotFoundError(
            f"{path} has no folder train; the layout is train/<class>/<picture>, val/..., test/...{alone}"
        )
    classes = _classes(folders["train"])
    listed = {name: _listed(folder, classes) for name, folder in folders.items() if folder}
    with ThreadPoolExecutor() as pool:
        read = {name: _read(pool, *found, classes, input_size) for name, found in listed.items()}
    if broken := [problem for _, problems in read.values() for problem in problems]:
        more = f" and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
        count = sum(len(files) for files, _ in listed.values())
        raise ValueError(
            f"{len(broken)} of {count} files cannot be read; remove or replace them: {', '.join(broken[:SHOWN])}{more}"
        )
    return {name: split for name, (split, _) in read.items() if split is not None}


def folder_channels(path: Path) -> int:
    """1 if the headers of all pictures below a folder say that they are grey, else 3; broken ones do not count."""
    with ThreadPoolExecutor() as pool:
        return 1 if all(_tried(pool, _grey, _pictures(path))[0]) else 3


def _grey(path: Path) -> bool:
    with Image.open(path) as picture:
        return says_grey(picture)


def _pictures(folder: Path) -> list[Path]:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMG_EXTENSIONS
        and path.is_file()
        and not any(map(_hidden, path.relative_to(folder).parts))
    )


def _hidden(name: str) -> bool:
    """Whether a file or folder is one that programs leave behind."""
    return name.startswith(".") or name == "__MACOSX"


def _first(path: Path, names: tuple[str, ...]) -> Path | None:
    return next((path / name for name in names if (path / name).is_dir()), None)


def _classes(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not _hidden(entry.name)))


def _listed(folder: Path, classes: tuple[str, ...]) -> tuple[list[Path], Tensor]:
    """The picture files of a split and their labels."""
    if not classes or _classes(folder) != classes:
        raise ValueError(
            f"{folder} holds the class folders {list(_classes(folder))}; needed is one for each class, the same in "
            f"every split, as in train: {list(classes)}"
        )
    files, labels = list[Path](), list[int]()
    for label, name in enumerate(classes):
        found = _pictures(folder / name)
        if not found:
            from torchvision.datasets.folder import IMG_EXTENSIONS

            raise ValueError(f"the class folder {folder / name} holds no pictures ({', '.join(IMG_EXTENSIONS)})")
        files += found
        labels += [label] * len(found)
    return files, torch.tensor(labels)


def _read(
    pool: ThreadPoolExecutor,
    files: list[Path],
    labels: Tensor,
    classes: tuple[str, ...],
    input_size: tuple[int, int, int],
) -> tuple[AnySplit | None, list[str]]:
    """A split, in memory or streamed; or None and what is wrong with its files."""
    reader = _Reader(files, input_size)
    if len(files) * torch.Size(input_size).numel() <= MEMORY_LIMIT:
        pictures, broken = _tried(pool, reader.picture, files)
        return None if broken else Split(torch.stack(pictures), labels, classes), broken
    _, broken = _tried(pool, _grey, files)
    return None if broken else Streamed(reader, torch.arange(len(files)), labels, input_size, classes), broken


class _Reader:
    """Reads picture i of a list at a size."""

    def __init__(self, files: list[Path], input_size: tuple[int, int, int]) -> None:
        self.files = files
        self.input_size = input_size

    def __call__(self, index: int) -> Tensor:
        return self.picture(self.files[index])

    def picture(self, path: Path) -> Tensor:
        """A picture as bytes, at the size."""
        channels, *size = self.input_size
        picture = preprocess(load_picture(path, channels), (size[0], size[1]))
        return picture.round().clamp(0, 255).to(torch.uint8)


def _tried(pool: ThreadPoolExecutor, read: Callable[[Path], T], files: list[Path]) -> tuple[list[T], list[str]]:
    """What a function makes of the files that it can read, and what is wrong with the others."""

    def attempt(path: Path) -> tuple[list[T], str]:
        try:
            return [read(path)], ""
        except Exception as error:  # every format of Pillow's raises its own on a broken file
            said = str(error).removeprefix(f"{path} is not a picture that Pillow can read: ")
            return [], f"{path} ({said if path.stat().st_size else 'the file is empty'})"

    results = list(pool.map(attempt, files))
    return [made for found, _ in results for made in found], [problem for _, problem in results if problem]
