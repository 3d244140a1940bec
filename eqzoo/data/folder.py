"""Image folders: one sub-folder per class, inside ``train``, ``val`` and ``test`` or without them."""

import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .._common import usable_cores
from .images import check_header, is_grayscale, load_image, preprocess, read_file
from .splits import AnySplit, Split, Streamed

__all__ = [
    "MEMORY_LIMIT",
    "class_names",
    "composed",
    "folder_colors",
    "folder_sides",
    "image_folder",
    "images_below",
    "inner_folders",
    "left_out",
    "read_files",
    "split_folder",
]

T = TypeVar("T")
MEMORY_LIMIT = 2**31  # bytes; larger splits are streamed
_OTHER_IMAGES = {".gif", ".jp2", ".j2k", ".jfif", ".avif", ".heic", ".heif", ".pnm", ".pbm", ".tga", ".psd"}
_OTHER_IMAGES |= {".dcm", ".czi", ".nd2", ".lif", ".svs", ".ndpi", ".fits"}
SHOWN = 10  # the number of unreadable files that an error lists
_NAMES = {"train": ("train", "training"), "valid": ("val", "valid", "validation"), "test": ("test", "testing")}


def image_folder(path: Path, input_size: tuple[int, int, int], flat: bool = False) -> dict[str, AnySplit]:
    """Reads an image folder, laid out as ``<split>/<class>/<image>``.

    The classes are the sorted names of the sub-folders of ``train``; ``val`` and ``test`` are optional. ``training``,
    ``valid``, ``validation`` and ``testing`` are accepted too, in lower or upper case. Images of any size
    and format are scaled and center-cropped to the input size, see `preprocess`.

    Args:
        path: The folder.
        input_size: Channels (1, 3 or 4), height and width.
        flat: Whether the layout ``<class>/<image>`` is accepted too; all images are then in ``train``.

    Returns:
        The splits; those of more than 2 GiB are streamed.

    Raises:
        FileNotFoundError: If there is no ``train`` folder.
        ValueError: If there are images but no classes, the splits differ in the classes that they have images of, there
            is a folder ``train``, ``val`` or ``test`` beside class folders or in each of them, or files cannot be read.
            Of a streamed split, only the headers of the files are checked.
    """
    folders = _split_folders(path, flat)
    found = {name: _class_files(folder) for name, folder in folders.items()}
    classes = tuple(found["train"])
    for name, files in found.items():
        if not classes or files.keys() != set(classes):
            raise ValueError(_of_other_classes(folders[name], classes, tuple(files)))
    listed = {}
    for name, files in found.items():
        labels = [label for label, own in enumerate(files.values()) for _ in own]
        listed[name] = [*chain(*files.values())], torch.tensor(labels)
    return read_files(path, listed, classes, input_size)


def _of_other_classes(folder: Path, classes: tuple[str, ...], here: tuple[str, ...]) -> str:
    """The error of a split without classes, or with others than the training images."""
    if not here and (images := images_below(folder)):
        return (
            f"{folder} holds images ({images[0].name} ...) without a folder for each class: sort them into such "
            "folders, or move the folder away and classify its images with eqzoo predict"
        )
    lacking, more = [name for name in classes if name not in here], [name for name in here if name not in classes]
    parts = [
        f"{verb} {', '.join(map(repr, names[:SHOWN]))}" + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
        for verb, names in (("lacks images of", lacking), ("has the additional folders", more))
        if names
    ]
    return (
        f"{folder} {' and '.join(parts) or 'has no folders of images'}; the class folders have to be the same in every "
        "split, with images in each: add or rename them, or leave a class out of all splits"
    )


def _split_folders(path: Path, flat: bool) -> dict[str, Path]:
    """The folders of the splits that there are, ``train`` among them; it raises what `image_folder` says of layouts."""
    folders = {name: folder for name, names in _NAMES.items() if (folder := _first(path, names))}
    others = [name for name in _class_files(path) if path / name not in folders.values()] if flat else []
    layout = "the layout is train/<class>/<image>, val/..., test/..." + ", or <class>/<image>" * flat
    if others and not folders:
        _check_order(path)
        return {"train": path}
    if "train" not in folders or (others and len(folders) == 1):
        names = [folder.name for folder in folders.values()]
        if not names and path.is_dir() and images_below(path):
            raise ValueError(_of_other_classes(path, (), ()))
        beside = f" has {' and '.join(names)} beside {others[0]};" if names and others else " has no folder train;"
        error = ValueError if names else FileNotFoundError
        raise error(f"{path}{beside} {layout}")
    return folders


def folder_colors(path: Path) -> tuple[int, list[str]]:
    """How many channels the images of a folder have by their headers: 1 if all are gray, else 3.

    And a line where some of them are gray and others are not. Unreadable files are ignored.
    """
    with _pool() as pool:
        found = _tried(pool, lambda file: (file, _gray(file)), _files(path))[0]
    colored = [file for file, gray in found if not gray]
    if not colored or len(colored) == len(found):
        return 3 if colored else 1, []
    gray = [file for file, gray in found if gray]
    kind, few, others = ("in color", colored, "gray") if len(colored) <= len(gray) else ("gray", gray, "in color")
    are = "is" if len(few) == 1 else "are"
    first = _shown(few[0].relative_to(path).as_posix())
    return 3, [
        f"{len(few):,} of the {len(found):,} images {are} {kind} ({first}{', ...' * (len(few) > 1)}) and the others "
        f"{others}: all are read as red, green and blue; if color means nothing here, add --channels 1"
    ]


def folder_sides(path: Path, count: int = 100) -> tuple[int, int] | None:
    """The medians of the shorter and the longer sides of at most ``count`` images of a folder, in pixels.

    None if none is readable.
    """
    files = _files(path)
    with _pool() as pool:
        found = _tried(pool, _sides, files[:: max(1, -(-len(files) // count))])[0]
    if not found:
        return None
    shorter, longer = (sorted(sides)[len(sides) // 2] for sides in zip(*found, strict=True))
    return shorter, longer


def inner_folders(path: Path) -> list[str]:
    """The sorted names of the folders inside of the class folders of an image folder that hold images."""
    return sorted({entry.name for entry in _inner(path)})


def _inner(path: Path) -> list[Path]:
    """The folders inside of the class folders that hold images."""
    entries = [entry for folder in _class_folders(path) for entry in folder.iterdir()]
    return [entry for entry in entries if entry.is_dir() and not _hidden(entry.name) and images_below(entry)]


def _class_folders(path: Path) -> list[Path]:
    """The class folders of all splits of an image folder, or of the folder itself."""
    splits = [folder for names in _NAMES.values() if (folder := _first(path, names))]
    return [folder / name for folder in splits or [path] for name in class_names(folder)]


def _files(path: Path) -> list[Path]:
    """The image files that `image_folder` reads, of all splits; other images may lie beside the class folders."""
    return [file for folder in _class_folders(path) for file in images_below(folder)]


def _pool() -> ThreadPoolExecutor:
    """Threads that read images, one for each core: each may hold a large image."""
    return ThreadPoolExecutor(usable_cores())


def _sides(path: Path) -> tuple[int, int]:
    return read_file(path, lambda image: (min(image.size), max(image.size)), whole=False)


def _gray(path: Path) -> bool:
    return read_file(path, is_grayscale, whole=False)


def images_below(folder: Path) -> list[Path]:
    """The image files in a folder and the folders in it, sorted, without hidden ones."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return sorted(path for path in _below(folder) if path.suffix.lower() in IMG_EXTENSIONS)


def _below(folder: Path) -> Iterator[Path]:
    """All files in a folder and the folders in it, also behind links, without hidden ones.

    A link that leads nowhere is a file, which then cannot be read. Folders that cannot be read are an error.
    """

    def fail(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        folders[:] = [name for name in folders if not _hidden(name)]
        yield from (Path(root, name) for name in files if not _hidden(name))


def left_out(folder: Path) -> list[str]:
    """A line on the files below a folder that hold images and are not read, because of the ends of their names."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    found = Counter(
        path.suffix.lower() for path in _below(folder) if path.suffix.lower() in _OTHER_IMAGES and path.is_file()
    )
    count = found.total()
    if not count:
        return []
    files = "1 file" if count == 1 else f"{count:,} files"
    return [
        f"{files} in {folder.name or folder} not read ({', '.join(sorted(found))}): images end in "
        f"{', '.join(IMG_EXTENSIONS)}; convert what is to be among them"
    ]


def split_folder(path: Path, split: str) -> Path | None:
    """The folder of a split, ``train``, ``valid`` or ``test``, in an image folder; None if there is none."""
    return _first(path, _NAMES[split])


def _hidden(name: str) -> bool:
    """Whether a file or folder is hidden, or left behind by macOS's archiver."""
    return name.startswith(".") or name == "__MACOSX"


def _first(path: Path, names: tuple[str, ...]) -> Path | None:
    """The folder that has one of these names, in lower or upper case; raises ValueError if there are several."""
    entries = sorted(path.iterdir()) if path.is_dir() else []
    found = [entry for entry in entries if entry.is_dir() and entry.name.casefold() in names]
    if len(found) > 1:
        several = " and ".join(entry.name for entry in found)
        raise ValueError(f"{path} has the folders {several} for the same images; join them, or rename one")
    return found[0] if found else None


def _check_order(path: Path) -> None:
    """Raises ValueError if the folders of splits are inside of the class folders, or in a single folder."""
    inner = _inner(path)
    names, parents = {folder.name for folder in inner}, sorted({folder.parent.name for folder in inner})
    known = {name for names in _NAMES.values() for name in names}
    # A folder of that name in one class of several is one of its sources.
    if inner and known.issuperset(map(str.casefold, names)) and len(parents) >= min(2, len(class_names(path))):
        raise ValueError(
            f"{path} has folders {', '.join(sorted(names))} inside of {', '.join(parents[:SHOWN])}; the layout is "
            "train/<class>/<image>, val/..., test/...: the other way round, or give the folder inside"
        )


def composed(name: str) -> str:
    """A name in one Unicode form: é is one character, and not e with an accent."""
    return unicodedata.normalize("NFC", name)


def _class_files(folder: Path) -> dict[str, list[Path]]:
    """The image files of each class of a split; empty class folders count as missing."""
    found = {name: images_below(folder / name) for name in class_names(folder)} if folder.is_dir() else {}
    return {name: files for name, files in found.items() if files}


def class_names(folder: Path) -> tuple[str, ...]:
    """The sorted names of the folders in a folder, which are those of the classes."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not _hidden(entry.name))
    for name in names:
        if (shown := _shown(name)) != name:
            raise ValueError(f"the name of the class folder {shown} in {folder} is not UTF-8; rename it")
    return tuple(names)


def _shown(name: str) -> str:
    """The name of a file or folder as text that can be printed: bytes that are not UTF-8 are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def read_files(
    root: Path,
    listed: Mapping[str, tuple[list[Path], Tensor]],
    classes: tuple[str, ...],
    input_size: tuple[int, int, int],
) -> dict[str, AnySplit]:
    """Splits of image files, in memory or, with more than 2 GiB, streamed.

    Args:
        root: A folder above the files, below which the splits name them.
        listed: The files of each split and their labels, ``(n,)`` int64.
        classes: The names of the classes.
        input_size: Channels (1, 3 or 4), height and width.

    Raises:
        ValueError: If files cannot be read; of a streamed split, only their headers are checked.
    """
    splits, broken = dict[str, AnySplit](), list[tuple[Path, str]]()
    with _pool() as pool:
        for name, (files, labels) in listed.items():
            splits[name], unreadable = _read(pool, root, files, labels, classes, input_size)
            broken += unreadable
    if broken:
        more = f" and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
        reasons = {reason for _, reason in broken}
        same = len(broken) > 1 and len(reasons) == 1
        why = f" (each: {reasons.pop()})" if same else ""
        shown = [f"{path}" if same else f"{path} ({reason})" for path, reason in broken[:SHOWN]]
        raise ValueError(
            f"{len(broken)} of {sum(map(len, splits.values()))} files cannot be read{why}; remove or replace them: "
            f"{', '.join(shown)}{more}"
        )
    return splits


def _read(
    pool: ThreadPoolExecutor,
    root: Path,
    files: list[Path],
    labels: Tensor,
    classes: tuple[str, ...],
    input_size: tuple[int, int, int],
) -> tuple[AnySplit, list[tuple[Path, str]]]:
    """A split, in memory or streamed, and each unreadable file with the reason."""
    reader, names = _Reader(files, input_size), tuple(file.relative_to(root).as_posix() for file in files)
    if len(files) * torch.Size(input_size).numel() > MEMORY_LIMIT:
        _, broken = _tried(pool, lambda file: read_file(file, check_header), files)
        return Streamed(reader, torch.arange(len(files)), labels, input_size, classes, names), broken
    images = torch.empty((len(files), *input_size), dtype=torch.uint8)
    place = dict(zip(files, images, strict=True))
    _, broken = _tried(pool, lambda file: place[file].copy_(reader.image(file)), files)
    return Split(images, labels, classes, names), broken


class _Reader:
    """Reads file i of a list, scaled and cropped to the input size."""

    def __init__(self, files: list[Path], input_size: tuple[int, int, int]) -> None:
        self.files = files
        self.input_size = input_size

    def __call__(self, index: int) -> Tensor:
        return self.image(self.files[index])

    def image(self, path: Path) -> Tensor:
        """An image of the input size, uint8."""
        channels, *size = self.input_size
        image = preprocess(load_image(path, channels), (size[0], size[1]))
        return image.round().clamp(0, 255).to(torch.uint8)


def _tried(
    pool: ThreadPoolExecutor, read: Callable[[Path], T], files: list[Path]
) -> tuple[list[T], list[tuple[Path, str]]]:
    """The results of a function for the files that it can read, and each that it cannot with the reason."""

    def attempt(path: Path) -> tuple[list[T], str]:
        try:
            return [read(path)], ""
        except MemoryError:  # which says nothing of the file
            raise
        except Exception as error:  # each of Pillow's formats raises its own errors on corrupt files
            reason = str(error) or type(error).__name__
            return [], reason.removeprefix(f"{path} is not an image that Pillow can read: ").removeprefix(f"{path}: ")

    results = list(pool.map(attempt, files))
    return [made for found, _ in results for made in found], [
        (path, said) for path, (found, said) in zip(files, results, strict=True) if not found
    ]
