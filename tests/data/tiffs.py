"""Writes TIFFs byte by byte, in forms that Pillow does not write."""

import struct
import zlib

import numpy as np


def tiff(*pages, order="<"):
    """A TIFF of pages; each is an array (height, width, bands), or one and the options of `_page`."""
    out = bytearray((b"II*\0" if order == "<" else b"MM\0*") + bytes(4))
    link = 4  # where the place of the next page belongs
    for page in pages:
        pixels, options = page if isinstance(page, tuple) else (page, {})
        chunks, tags = _page(pixels, order, **options)
        tags[273 if 278 in tags else 324] = [len(out) + sum(map(len, chunks[:i])) for i in range(len(chunks))]
        out += b"".join(chunks)
        entries = b""
        for tag, numbers in sorted(tags.items()):
            packed = struct.pack(f"{order}{len(numbers)}I", *numbers)
            if len(numbers) > 1:
                packed, place = struct.pack(f"{order}I", len(out)), len(out)
                out += struct.pack(f"{order}{len(numbers)}I", *numbers)
                assert place % 2 == 0
            entries += struct.pack(f"{order}HHI", tag, 4, len(numbers)) + packed
        out[link : link + 4] = struct.pack(f"{order}I", len(out))
        out += struct.pack(f"{order}H", len(tags)) + entries
        link = len(out)
        out += bytes(4)
    return bytes(out)


def _page(pixels, order, planar=False, tile=None, deflate=False, extra=0, colors=None, **more):
    """The strips or tiles of a page, and its tags without their places.

    Args:
        pixels: (height, width, bands).
        order: Of the bytes.
        planar: Whether the bands lie one behind the other.
        tile: The side of its tiles; None for one strip a band.
        deflate: Whether they are compressed.
        extra: What the bands behind the colors are: 2 is opacity.
        colors: How many bands are colors; None for 3 if there are as many, else 1.
        more: Further tags, as ``t254=[4]``.
    """
    height, width, bands = pixels.shape
    colors = colors or (3 if bands >= 3 else 1)
    planes = np.split(pixels, bands, axis=2) if planar else [pixels]
    side = tile or max(height, width)
    chunks = []
    for plane in planes:
        padded = np.pad(plane, ((0, -height % side), (0, -width % side), (0, 0))) if tile else plane
        for y in range(0, len(padded), side):
            for x in range(0, padded.shape[1], side):
                part = padded[y : y + side, x : x + side]
                chunks.append(part.astype(pixels.dtype.newbyteorder(order)).tobytes())
    chunks = [zlib.compress(chunk) for chunk in chunks] if deflate else chunks
    chunks = [chunk + bytes(-len(chunk) % 2) for chunk in chunks]
    tags = {256: [width], 257: [height], 258: [8 * pixels.itemsize] * bands, 259: [8 if deflate else 1]}
    tags |= {262: [2 if colors == 3 else 1], 277: [bands], 284: [2 if planar else 1]}
    tags |= {339: [3 if pixels.dtype.kind == "f" else 1] * bands}
    tags |= {322: [tile], 323: [tile], 325: [*map(len, chunks)]} if tile else {278: [height], 279: [*map(len, chunks)]}
    if bands > colors:
        tags[338] = [extra] * (bands - colors)
    return chunks, tags | {int(name[1:]): numbers for name, numbers in more.items()}
