"""Image folders: one sub-folder per class, inside ``train``, ``val`` and ``test`` or without them."""

import os
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .._common import usable_cores
from .images import check_header, is_grayscale, load_image, preprocess_uint8, read_file
from .splits import AnySplit, Split, Streamed

S = TypeVar("S")
T = TypeVar("T")
MEMORY_LIMIT = 2**31  # bytes; larger splits are streamed
_OTHER_IMAGES = {".gif", ".jp2", ".j2k", ".jfif", ".avif", ".heic", ".heif", ".pnm", ".pbm", ".tga", ".psd"}
_OTHER_IMAGES |= {".dcm", ".czi", ".nd2", ".lif", ".svs", ".ndpi", ".fits"}
LEFT_BEHIND = {"__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found"}
SHOWN = 10  # the number of names, or of unreadable files, that an error lists
_NAMES = {"train": ("train", "training"), "valid": ("val", "valid", "validation"), "test": ("test", "testing")}


def image_folder(
    path: Path, input_size: tuple[int, int, int], flat: bool = False, part: str | None = None
) -> dict[str, AnySplit]:
    """Reads an image folder, laid out as ``<split>/<class>/<image>``.

    The classes are the sub-folders of ``train``, in the order of `class_names`; ``val`` and ``test`` are optional.
    ``training``, ``valid``, ``validation`` and ``testing`` are accepted too, in lower or upper case. Images of any size
    and format are scaled and center-cropped to the input size, see `preprocess`.

    Args:
        path: The folder.
        input_size: Channels (1, 3 or 4), height and width.
        flat: Whether the layout ``<class>/<image>`` is accepted too; all images are then in ``train``.
        part: The only split to read, such as ``"test"``; None for all.

    Returns:
        The splits; those of more than 2 GiB are streamed.

    Raises:
        FileNotFoundError: If there is no ``train`` folder.
        ValueError: If there are images but no classes, the splits differ in the classes that they have images of, there
            is a folder ``train``, ``val`` or ``test`` beside class folders or in each of them, the name of a class is
            not UTF-8, or files cannot be read.
            Of a streamed split, only the headers of the files are checked.
    """
    folders = {part: alone} if part and (alone := split_folder(path, part)) else _split_folders(path, flat)
    found = {name: _class_files(folder) for name, folder in folders.items()}
    first, classes = next((name, tuple(files)) for name, files in found.items())
    for name in classes:
        try:
            name.encode()
        except UnicodeEncodeError as error:  # no file could hold the name
            raise ValueError(f"the class folder {name!r} in {path} has a name that is not UTF-8: rename it") from error
    listed = {}
    for name, files in found.items():
        if not classes or files.keys() != set(classes):
            raise ValueError(
                f"{folders[name]} has images of the classes: {some_names(files)}; {first} has: {some_names(classes)}; "
                "all splits have the same class folders, and images without classes are for eqzoo predict"
                f"{'' if files else _no_class(folders[name])}"
            )
        labels = [label for label, own in enumerate(files.values()) for _ in own]
        listed[name] = [*chain(*files.values())], torch.tensor(labels)
    return read_files(path, listed, classes, input_size)


class NamingLine(str):
    """A line of advice with names of the user's files or folders, and ``published``, the same without them.

    Names may tell of patients: what is uploaded with a checkpoint has none.
    """

    published: str

    def __new__(cls, before: str, names: str, after: str) -> "NamingLine":
        """The line of three parts, of which the second is left out of ``published``."""
        line = super().__new__(cls, before + names + after)
        line.published = before + after
        return line


def some_names(names: Collection[str], count: int = SHOWN) -> str:
    """The first names, quoted, as errors list them."""
    return ", ".join(map(repr, [*names][:count])) + (", ..." if len(names) > count else "") or "none"


def _split_folders(path: Path, flat: bool) -> dict[str, Path]:
    """The folders of the splits that there are, ``train`` among them.

    Raises:
        FileNotFoundError: If there are no folders.
        ValueError: If those of splits are beside class folders, inside of these, or without ``train``.
    """
    folders = {name: folder for name in _NAMES if (folder := split_folder(path, name))}
    others = [name for name in _class_files(path) if path / name not in folders.values()] if flat else []
    if "train" in folders and (len(folders) > 1 or not others):
        return folders
    if others and not folders and not _splits_inside(path):
        return {"train": path}
    error = ValueError if folders or others else FileNotFoundError
    raise error(
        f"the layout of {path} is train/<class>/<image>, val/..., test/..."
        f"{', or <class>/<image> without these' if flat else ''}; it has the folders: "
        f"{some_names(class_names(path) if path.is_dir() else ())}"
        f"{''.join(map(_no_class, folders.values())) if others else ''}"
    )


def _no_class(folder: Path) -> str:
    return f"; {folder.name!r} is the name of a part of the images: if it is a class here, rename its folder"


def _splits_inside(path: Path) -> bool:
    """Whether the class folders have folders of splits inside, which would be read as sources of the images."""
    inner = _inner(path)
    known = {name for names in _NAMES.values() for name in names}
    # A folder of that name in one class of several is one of its sources.
    several = len({folder.parent for folder in inner}) >= min(2, len(class_names(path)))
    return bool(inner) and several and known.issuperset(folder.name.casefold() for folder in inner)


def folder_of(data: object, part: str | None = None) -> Path | None:
    """The folder of the data, or of a part of it, where there is one; None for data of another kind."""
    if not isinstance(data, str | os.PathLike) or not Path(data).is_dir():
        return None
    return (split_folder(Path(data), part) if part else None) or Path(data)


def channels_found(data: object) -> tuple[int | None, list[str]]:
    """How many channels the images of a folder have by their headers: 1 if all are gray, else 3.

    And a line where some of them are gray and others are not. Unreadable files are ignored. None and no line for data
    of another kind, which has as many channels as its arrays.
    """
    if not (path := folder_of(data)):
        return None, []
    with _pool() as pool:
        found = _tried(pool, lambda file: (file, read_file(file, is_grayscale, whole=False)), _files(path))[0]
    gray = [file.relative_to(path).as_posix() for file, is_gray in found if is_gray]
    if not gray or len(gray) == len(found):
        return 1 if len(gray) == len(found) else 3, []
    return 3, [
        NamingLine(
            f"some images are gray ({len(gray):,} of {len(found):,}",
            f", such as {gray[0]!r}",
            ") and others in color: all are read as red, green and blue; if color means nothing here, add --channels 1",
        )
    ]


def folder_sides(path: Path, part: str | None = None, count: int = 100) -> tuple[int, int] | None:
    """The medians of the shorter and the longer sides of at most ``count`` images of a folder or its part, in pixels.

    None if none is readable.
    """
    files = _files(path, part)
    with _pool() as pool:
        some = files[:: max(1, -(-len(files) // count))]
        found = _tried(pool, lambda file: read_file(file, lambda image: sorted(image.size), whole=False), some)[0]
    if not found:
        return None
    shorter, longer = (sorted(sides)[len(sides) // 2] for sides in zip(*found, strict=True))
    return shorter, longer


def folders_in_classes(data: object) -> list[str]:
    """The sorted names of the folders with images inside of the class folders; none for data of another kind."""
    folder = folder_of(data)
    return sorted({entry.name for entry in _inner(folder)}) if folder else []


def _inner(path: Path) -> list[Path]:
    """The folders inside of the class folders that hold images."""
    entries = [entry for folder in _class_folders(path) for entry in folder.iterdir()]
    return [entry for entry in entries if entry.is_dir() and not _hidden(entry.name) and images_below(entry)]


def _class_folders(path: Path, part: str | None = None) -> list[Path]:
    """The class folders of all splits of an image folder or of one, or of the folder itself."""
    splits = [folder for name in ([part] if part else _NAMES) if (folder := split_folder(path, name))]
    return [folder / name for folder in splits or [path] for name in class_names(folder)]


def _files(path: Path, part: str | None = None) -> list[Path]:
    """The image files that `image_folder` reads; other images may lie beside the class folders."""
    return [file for folder in _class_folders(path, part) for file in images_below(folder)]


def _pool() -> ThreadPoolExecutor:
    """Threads that read images, one for each core: each may hold a large image."""
    return ThreadPoolExecutor(usable_cores())


def images_below(folder: Path) -> list[Path]:
    """The image files in a folder and the folders in it, sorted, without hidden ones."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return sorted(path for path in _below(folder) if path.suffix.lower() in IMG_EXTENSIONS)


def _below(folder: Path) -> Iterator[Path]:
    """All files in a folder and the folders in it, also behind links, without hidden ones.

    A link that leads nowhere is a file, which then cannot be read; one to a folder that it is in is left out. Folders
    that cannot be read are an error.
    """

    def fail(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        folders[:] = [name for name in folders if not _hidden(name) and not _leads_back(Path(root, name))]
        yield from (Path(root, name) for name in files if not _hidden(name))


def _leads_back(folder: Path) -> bool:
    """Whether a folder is a link to one of those in its path, as they are named or linked, or to one around these."""
    return folder.is_symlink() and any(up.resolve().is_relative_to(folder.resolve()) for up in folder.parents)


def files_left_out(data: object, part: str | None = None) -> list[str]:
    """Lines on the images of a folder, or of its part ``part``, that `image_folder` leaves out; none for other data."""
    if not (folder := folder_of(data, part)):
        return []
    splits = [split for name in _NAMES if (split := split_folder(folder, name))]
    beside, loose = list[str](), list[str]()
    for file in sorted({*images_below(folder)} - {*_files(folder)}):
        place = file.relative_to(folder)
        is_beside = splits and len(place.parts) > 1 and folder / place.parts[0] not in splits
        (beside if is_beside else loose).append(place.as_posix())
    name, move = folder.name or folder, "if they have a class, move them into its folder"
    return [
        *lines_on_other_formats(data, part),
        *_unread(f"images in folders of {name} beside its splits", beside, "name a split's folder train, val or test"),
        *_unread(f"images in {name} that are in no class folder", loose, move),
    ]


def lines_on_other_formats(data: object, part: str | None = None) -> list[str]:
    """At most one line, on files of image formats that are not read in a folder, or in its part ``part``."""
    if not (folder := folder_of(data, part)):
        return []
    found = [path.name for path in _below(folder) if path.suffix.lower() in _OTHER_IMAGES]
    convert = "convert what is to be among the images to .png, .jpg, .tif or .webp"
    return _unread(f"files of other image formats in {folder.name or folder}", found, convert)


def _unread(subject: str, files: Sequence[str], advice: str) -> list[str]:
    """A line on files that are not read, or none if there are none."""
    if not files:
        return []
    return [NamingLine(f"{subject} are not read ({len(files):,}", f", such as {files[0]!r}", f"): {advice}")]


def _hidden(name: str) -> bool:
    """Whether a file or folder is hidden, or one that archivers and drives make."""
    return name.startswith(".") or name in LEFT_BEHIND


def split_folder(path: Path, split: str) -> Path | None:
    """The folder of a split in an image folder, by any of its names, in lower or upper case; None if there is none.

    Raises:
        ValueError: If there are several.
    """
    names = next(names for names in _NAMES.values() if split in names)
    entries = sorted(path.iterdir()) if path.is_dir() else []
    found = [entry for entry in entries if entry.is_dir() and entry.name.casefold() in names]
    if len(found) > 1:
        several = " and ".join(entry.name for entry in found)
        raise ValueError(f"{path} has the folders {several} for the same images; join them, or rename one")
    return found[0] if found else None


def composed(name: str) -> str:
    """A name in one Unicode form: é is one character, and not e with an accent."""
    return unicodedata.normalize("NFC", name)


def _class_files(folder: Path) -> dict[str, list[Path]]:
    """The image files of each class of a split, by its composed name; empty class folders count as missing."""
    found: dict[str, list[Path]] = {}
    for name in class_names(folder) if folder.is_dir() else ():
        if files := images_below(folder / name):
            found[composed(name)] = found.get(composed(name), []) + files
    return found


def class_names(folder: Path) -> tuple[str, ...]:
    """The names of the folders in a folder, which are those of the classes: numbers by value, then others as text."""
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() and not _hidden(entry.name)]
    return tuple(sorted(names, key=lambda name: (*_as_number(name), composed(name), name)))


def _as_number(name: str) -> tuple[int, int]:
    return (0, int(name)) if name.isdecimal() else (1, 0)


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
    splits, broken = dict[str, AnySplit](), list[str]()
    with _pool() as pool:
        for name, (files, labels) in listed.items():
            names = tuple(file.relative_to(root).as_posix() for file in files)
            splits[name], unreadable = _read(pool, _Reader(files, input_size), labels, classes, names)
            broken += unreadable
    if broken:
        raise ValueError(
            f"{len(broken)} of {sum(map(len, splits.values()))} files cannot be read; remove or replace them: "
            f"{'; '.join(broken[:SHOWN])}{'; ...' if len(broken) > SHOWN else ''}"
        )
    return splits


@dataclass(frozen=True)
class _Reader:
    """Reads file i of a list, scaled and cropped to the input size, uint8."""

    files: list[Path]
    input_size: tuple[int, int, int]

    def __call__(self, index: int) -> Tensor:
        channels, *size = self.input_size
        return preprocess_uint8(load_image(self.files[index], channels), (size[0], size[1]))


def _read(
    pool: ThreadPoolExecutor, reader: _Reader, labels: Tensor, classes: tuple[str, ...], names: tuple[str, ...]
) -> tuple[AnySplit, list[str]]:
    """A split, in memory or streamed, and what is wrong with each unreadable file."""
    files, size = reader.files, reader.input_size
    if len(files) * torch.Size(size).numel() > MEMORY_LIMIT:
        _, broken = _tried(pool, lambda file: read_file(file, check_header), files)
        return Streamed(reader, torch.arange(len(files)), labels, size, classes, names), broken
    images = torch.empty((len(files), *size), dtype=torch.uint8)
    _, broken = _tried(pool, lambda i: images[i].copy_(reader(i)), range(len(files)))
    return Split(images, labels, classes, names), broken


def _tried(pool: ThreadPoolExecutor, read: Callable[[S], T], items: Iterable[S]) -> tuple[list[T], list[str]]:
    """The results of a function for the items that it can read, and what is wrong with each that it cannot."""

    def attempt(item: S) -> tuple[list[T], list[str]]:
        try:
            return [read(item)], []
        except (ValueError, OSError) as error:
            return [], [str(error)]

    results = list(pool.map(attempt, items))
    return [made for found, _ in results for made in found], [text for _, broken in results for text in broken]
