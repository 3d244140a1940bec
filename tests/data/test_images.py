"""Reading images, their brightness, and preprocessing."""

import io
import itertools
import shutil
import struct
import warnings
import zlib
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from eqzoo.data import load_image, load_splits, normalize, pixels, preprocess
from eqzoo.data.brightness import unlike_training
from eqzoo.data.folder import folder_sides
from eqzoo.groups import P4M, transform
from tests.conftest import ROOT
from tests.data.tiffs import tiff


@pytest.mark.parametrize("shape", [(28, 28), (280, 280), (61, 40), (40, 61), (100, 333), (20, 21)])
def test_preprocessing_commutes_with_rotations_and_reflections(shape):
    image = torch.rand(3, *shape) * 255
    straight = preprocess(image, (28, 28))
    assert straight.shape == (3, 28, 28)
    for g in P4M.elements:
        rotated = preprocess(transform(image, P4M, g, "trivial"), (28, 28))
        torch.testing.assert_close(rotated, transform(straight, P4M, g, "trivial"), rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_preprocessing_of_16_bits(dtype):
    image = torch.randint(0, 256, (3, 20, 30)).to(dtype)
    found = preprocess(image, (16, 16))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), preprocess(image.float(), (16, 16)), rtol=1e-2, atol=1)


def test_preprocessing_keeps_values_beyond_those_of_pixels():
    image = torch.rand(5, 69, 69, generator=torch.manual_seed(0)) * 3000 - 500
    scaled = preprocess(image, (64, 64))
    assert scaled.min() < -300
    assert scaled.max() > 2300
    assert image.min() <= scaled.min()
    assert scaled.max() <= image.max()
    edge = torch.zeros(1, 8, 8)
    edge[..., 4:] = 255  # bicubic interpolation overshoots at an edge
    assert preprocess(edge, (31, 31)).aminmax() == (0, 255)
    both = preprocess(torch.stack([edge, edge * 10]), (31, 31))  # each image of a batch by its own values
    assert torch.equal(both[0], preprocess(edge, (31, 31)))
    image[0, 0, 0] = float("nan")
    assert preprocess(image, (64, 64)).isnan().all()
    assert preprocess(image, (69, 69)).isnan().sum() == 1
    assert preprocess(torch.empty(3, 40, 50, device="meta"), (28, 28)).shape == (3, 28, 28)


def test_normalize():
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).reshape(3, 1, 1, 1)
    assert normalize(images, (0.2,), (0.4,), torch.float64).flatten().tolist() == pytest.approx([-0.5, 2, 0])
    one_for_all = normalize(images.view(1, 3, 1, 1), (0.2,), (0.4,), torch.float64)
    assert one_for_all.flatten().tolist() == pytest.approx([-0.5, 2, 0])
    for mean, std in (((0.2, 0.2), (0.4,)), ((0.2, 0.2), (0.4, 0.4)), ((0.2,), (0.4, 0.4))):
        with pytest.raises(ValueError, match="mean and std"):
            normalize(images, mean, std, torch.float64)
    with pytest.raises(ValueError, match=r"torch\.uint8"):
        normalize(images, (0.2,), (0.4,), images.dtype)


def test_images_in_0_to_1_are_not_normalized_without_a_word():
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).reshape(3, 1, 1, 1)
    with pytest.warns(UserWarning, match="largest value of the images is 1, and normalize takes values in 0 to 255"):
        normalize(images / 255, (0.2,), (0.4,), torch.float64)
    edge = torch.zeros(1, 8, 8)
    edge[..., 4:] = 1
    over = preprocess(edge, (31, 31))[None]
    assert over.max() > 1.01  # bicubic interpolation
    with pytest.warns(UserWarning, match="multiply"):
        normalize(over, (0.2,), (0.4,), torch.float64)
    with pytest.warns(UserWarning, match="the largest value of the images is 5500"):  # raw counts
        normalize(images * 5500.0 / 255, (0.5,), (0.5,), torch.float64)
    with pytest.warns(UserWarning, match="the largest value of the images is 5100"):
        normalize((images.int() * 20).to(torch.uint16), (0.5,), (0.5,), torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for silent in (images / 51, images * 0.0, torch.zeros(0, 1, 4, 4), images // 255, images.int() // 255):
            normalize(silent, (0.2,), (0.4,), torch.float64)


def test_normalizing_is_traced_and_mapped():
    x = torch.rand(2, 3, 4, 4) * 255

    def of(x):
        return normalize(x, (0.2, 0.3, 0.4), (0.4, 0.5, 0.6), torch.float64)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(of, x)
    for again in (traced, torch.fx.symbolic_trace(of), torch.compile(of, backend="eager", fullgraph=True)):
        torch.testing.assert_close(again(x), of(x))
    torch.testing.assert_close(torch.func.vmap(of)(x[None]), of(x)[None])


def test_tiffs_say_what_their_numbers_are(tmp_path):
    gray = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4000
    Image.fromarray(gray).save(tmp_path / "black.tif")
    Image.fromarray(gray).save(tmp_path / "white.tif", tiffinfo={262: 0})  # 0 is white
    expected = torch.from_numpy(gray.astype(np.float32) / 257)[None]
    torch.testing.assert_close(load_image(tmp_path / "black.tif", 1), expected)
    torch.testing.assert_close(load_image(tmp_path / "white.tif", 1), 255 - expected)
    Image.fromarray(gray.astype(np.int32)).save(tmp_path / "32.tif")  # read by its type, not by its values
    Image.fromarray(gray.astype(np.float32)).save(tmp_path / "float.tif")
    Image.fromarray(gray).save(tmp_path / "signed16.tif", tiffinfo={339: 2})
    Image.fromarray(gray.astype(np.uint8)).save(tmp_path / "signed8.tif", tiffinfo={339: 2})
    for name, said in (
        ("32.tif", "32-bit numbers with a sign"),
        ("signed16.tif", "16-bit numbers with a sign"),
        ("signed8.tif", "8-bit numbers with a sign"),
        ("float.tif", "floating point numbers, 0 to 60000"),
    ):
        with pytest.raises(ValueError, match=f"{name}: its pixels are {said}"):
            load_image(tmp_path / name, 1)
    with pytest.raises(ValueError, match="its pixels are 32-bit numbers, 0 to 70000"):
        pixels(Image.fromarray(np.array([[0, 70_000]], np.int32)), 1)


def test_tiffs_of_12_bits_have_the_full_range(tmp_path):
    numbers = [0, 1000, 4095, 2048]
    packed = bytes.fromhex("".join(f"{number:03x}" for number in numbers))
    row = np.frombuffer(packed, np.uint8).reshape(1, 6, 1)
    (tmp_path / "12.tif").write_bytes(tiff((row, {"t256": [4], "t258": [12]})))
    expected = torch.tensor(numbers).float() * 255 / 4095
    torch.testing.assert_close(load_image(tmp_path / "12.tif", 1).flatten(), expected)


def test_bands_that_are_no_colors_are_not_lost(tmp_path, monkeypatch):
    values = np.random.default_rng(0).integers(0, 256, (5, 6, 6)).astype(np.uint8)
    for bands, known in ((1, 1), (3, 3), (2, 1), (4, 3)):
        (tmp_path / f"{bands}.tif").write_bytes(tiff(values[..., :bands]))
        with Image.open(tmp_path / f"{bands}.tif") as image:
            assert len(image.getbands()) == known
    for bands in (1, 3):
        expected = torch.from_numpy(values[..., :bands]).permute(2, 0, 1).float()
        assert torch.equal(load_image(tmp_path / f"{bands}.tif", bands), expected)
    for bands, known in ((2, 1), (4, 3)):
        for channels in (1, 3, 4):
            with pytest.raises(ValueError, match=rf"{bands}.tif: it has {bands} bands, of which Pillow reads {known};"):
                load_image(tmp_path / f"{bands}.tif", channels)
    (tmp_path / "alpha.tif").write_bytes(tiff((values[..., :4], {"extra": 2})))
    assert torch.equal(
        load_image(tmp_path / "alpha.tif", 4), torch.from_numpy(values[..., :4]).permute(2, 0, 1).float()
    )
    for name in "ab":
        (tmp_path / "mine" / "train" / name).mkdir(parents=True)
        (tmp_path / "mine" / "train" / name / "4.tif").write_bytes(tiff(values[..., :4]))
    for limit in (2**31, 0):  # of files that are streamed, headers are checked before the training
        monkeypatch.setattr("eqzoo.data.folder.MEMORY_LIMIT", limit)
        with pytest.raises(ValueError, match=r"2 of 2 files cannot be read.* it has 4 bands, of which"):
            load_splits("mine", tmp_path, input_size=(3, 8, 8))
    (tmp_path / "6.tif").write_bytes(tiff((values, {"colors": 1})))
    with pytest.raises(ValueError, match=r"6\.tif .*or its bands in a \.npz file$"):
        load_image(tmp_path / "6.tif", 3)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("tile", [None, 16])
@pytest.mark.parametrize("bands", [1, 2, 3, 4])
def test_tiffs_with_bands_apart_have_the_right_pixels_or_name_the_file(tmp_path, bands, tile, order):
    random, right = np.random.default_rng(0), 0
    for kind, white in (("u1", 255), ("u2", 65_535), ("f4", 1)):
        values = (random.random((21, 18, bands)) * white).astype(kind)
        expected = torch.from_numpy(values.astype(np.float32)).permute(2, 0, 1) * 255 / white
        for planar, deflate in itertools.product((False, True), repeat=2):
            path = tmp_path / f"{kind}{planar}{deflate}.tif"
            options = {"planar": planar, "tile": tile, "deflate": deflate, "extra": 2}
            path.write_bytes(tiff((values, options), order=order))
            read = torch.full((4, 21, 18), torch.nan)
            with suppress(ValueError):
                read = load_image(path, 4)
                right += 1
            kept = {1: [0], 2: [0, 3], 3: [0, 1, 2], 4: [0, 1, 2, 3]}[bands]
            assert read.isnan().all() or (read[kept] - expected).abs().max() < 1.01  # 16 bits of colors become 8
            if read.isnan().all():
                with pytest.raises(ValueError, match=f"{path.name}.* save it"):
                    load_image(path, 4)
    assert right == {1: 8, 2: 2, 3: 8, 4: 8}[bands]  # of twelve: none of floating point numbers


def test_pages_behind_an_image_that_are_its_copies_or_mask(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8)
    expected = torch.from_numpy(values).permute(2, 0, 1).float()
    mask = (np.full((16, 2, 1), 255, np.uint8), {"t254": [4], "t256": [16], "t258": [1], "t262": [4]})
    pyramid = (values[::2, ::2], {"t254": [1]})
    thumbnail = values[::4, ::4]
    same = (values, {"t254": [1]})  # a copy in another compression, as its tag says
    for pages in ((mask,), (pyramid, thumbnail), (thumbnail, mask), (same,)):
        (tmp_path / "a.tif").write_bytes(tiff(values, *pages))
        assert torch.equal(load_image(tmp_path / "a.tif", 3), expected)
    for pages in ((values, mask, values), (values, thumbnail, values), (thumbnail, values)):
        (tmp_path / "b.tif").write_bytes(tiff(*pages))
        with pytest.raises(ValueError, match="it holds several images"):
            load_image(tmp_path / "b.tif", 3)


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
def test_orientations_of_tiff_files(tmp_path, compression):
    values = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    moves = (
        lambda x: x, np.fliplr, lambda x: np.rot90(x, 2), np.flipud, np.transpose, lambda x: np.rot90(x, 3),
        lambda x: np.rot90(x, 2).T, np.rot90,
    )  # fmt: skip
    for orientation, move in enumerate(moves, 1):
        for deep in (values, values.astype(np.uint16) * 257, np.stack([values] * 3, -1)):
            Image.fromarray(deep).save(tmp_path / "a.tif", tiffinfo={274: orientation}, compression=compression)
            expected = torch.from_numpy(move(values).copy()).double()[None]
            with Image.open(tmp_path / "a.tif") as image:
                for found in (pixels(image, 1), load_image(tmp_path / "a.tif", 1)):
                    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)


JPEG_2000_OF_12_BITS = (  # a white image of 2 x 2 pixels
    "ff4fff51002f0000000000020000000200000000000000000000000200000002000000000000000000030b01010b01010b0101ff"
    "52000c00000001010004040001ff5c00044060ff90000a0000000000160001ff93cfe40c01cabf8080ffd9"
)


def test_files_that_pillow_alone_misreads(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (6, 8, 3)).astype(np.uint8)
    gray = values[..., :1]
    reversed_bits = np.packbits(np.unpackbits(values[..., None], axis=3, bitorder="little"), axis=3)[..., 0]
    opaque = np.concatenate([gray, np.full_like(gray, 255)], 2)
    for page, expected in (((reversed_bits, {"planar": True, "t266": [2]}), values), ((opaque, {"extra": 1}), gray)):
        (tmp_path / "a.tif").write_bytes(tiff(page))
        found = load_image(tmp_path / "a.tif", expected.shape[2])
        assert torch.equal(found, torch.from_numpy(expected).permute(2, 0, 1).float())


def test_files_that_pillow_misreads_are_errors(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (6, 8, 4)).astype(np.uint8)
    gray = values[..., :1]
    for name, page in {
        "palette": (gray, {"t262": [3], "t320": [*range(256)] * 3}),
        "apart": (values, {"planar": True, "colors": 4, "t262": [2]}),
        "deep": (gray, {"t32997": [2]}),
        "small": (gray, {"t254": [1], "t330": [8]}),
    }.items():
        (tmp_path / f"{name}.tif").write_bytes(tiff(page))
    image = Image.fromarray(gray[..., 0])
    image.save(tmp_path / "stack.tif", tiffinfo={270: "ImageJ=1.11a\nimages=3\nslices=3\n"})
    image.save(tmp_path / "cut.tif", tiffinfo={270: '{"shape": [3, 6, 8], "truncated": true}'})
    image.save(tmp_path / "one.tif", tiffinfo={270: "ImageJ=1.11a\nimages=1\n"})
    colors = [*range(0, 65_536, 257)]
    (tmp_path / "colors.tif").write_bytes(tiff((gray, {"t262": [3], "t320": colors * 3})))
    image.save(tmp_path / "eight.jp2")
    image.convert("1").save(tmp_path / "bits.bmp")
    for name in ("one.tif", "colors.tif", "eight.jp2", "bits.bmp"):
        assert load_image(tmp_path / name, 1).std() > 10
    cards = ("SIMPLE  = T", "BITPIX  = 16", "NAXIS   = 2", "NAXIS1  = 8", "NAXIS2  = 6", "BZERO   = 32768", "END")
    (tmp_path / "stars.fits").write_bytes("".join(f"{card:80}" for card in cards).ljust(2880).encode() + bytes(96))
    (tmp_path / "white.j2k").write_bytes(bytes.fromhex(JPEG_2000_OF_12_BITS))
    image.convert("P").save(tmp_path / "mask.bmp")
    data = (tmp_path / "mask.bmp").read_bytes()
    (tmp_path / "mask.bmp").write_bytes(data[:46] + b"\2\0\0\0" + data[50:54] + b"\0\0\0\0\xff\xff\xff\0" + data[62:])
    refused = {
        "palette.tif": "palette", "apart.tif": "one behind the other", "deep.tif": "several", "small.tif": "several",
        "stack.tif": "several", "cut.tif": "several", "stars.fits": "FITS", "white.j2k": "12 bits", "mask.bmp": "BMP",
    }  # fmt: skip
    for name, words in refused.items():
        with pytest.raises(ValueError, match=words):
            load_image(tmp_path / name, 3)


def test_png_files_whose_metadata_pillow_refuses(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (8, 6, 3)).astype(np.uint8)
    expected = torch.from_numpy(values).permute(2, 0, 1).float()
    exif = Image.Exif()
    exif[274] = 3  # rotated by 180 degrees
    path, text = tmp_path / "a.png", PngInfo()
    text.add_itxt("history", "a" * 1_400_000, zip=True)
    profile = np.random.default_rng(0).bytes(1_400_000)
    for options in ({"icc_profile": profile}, {"pnginfo": text}):
        Image.fromarray(values).save(path, exif=exif, **options)
        assert torch.equal(load_image(path, 3), expected.flip(1, 2))
    assert folder_sides(shutil.copytree(tmp_path, tmp_path / "mine" / "class").parent) == (6, 8)
    Image.fromarray(values).save(path, exif=exif)
    data = bytearray(path.read_bytes())
    place = data.index(b"eXIf")
    for damage, crc in ((b"no", True), (b"no", False)):
        data[place + 4 : place + 6] = damage
        size = int.from_bytes(data[place - 4 : place], "big")
        if crc:
            data[place + 4 + size : place + 8 + size] = zlib.crc32(data[place : place + 4 + size]).to_bytes(4, "big")
        else:
            data[place + 4 + size] ^= 1
        path.write_bytes(data)
        assert torch.equal(load_image(path, 3), expected)
    place = data.index(b"IDAT")
    data[place + 10] ^= 1  # pixels that are damaged stay an error
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.png is not an image"):
        load_image(path, 3)


@pytest.mark.parametrize("suffix", ["tif", "gif", "png", "webp"])
def test_stacks_and_animations_are_errors(tmp_path, suffix):
    pages = [Image.new("L", (6, 4), shade) for shade in (0, 100, 200)]
    pages[0].save(tmp_path / f"stack.{suffix}", save_all=True, append_images=pages[1:])
    with pytest.raises(ValueError, match="it holds several images"):
        load_image(tmp_path / f"stack.{suffix}", 1)
    with Image.open(tmp_path / f"stack.{suffix}") as image:
        image.seek(2)  # chosen by the caller
        assert pixels(image, 1).mean() > 150
    pages[0].save(tmp_path / f"one.{suffix}")
    assert load_image(tmp_path / f"one.{suffix}", 1).shape == (1, 4, 6)


def test_unreadable_images_are_errors(tmp_path, monkeypatch):
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes((ROOT / "examples" / "seven.png").read_bytes()[:500])
    for name in ("empty.png", "text.png", "cut.png"):
        with pytest.raises(ValueError, match=f"{name} is not an image"):
            load_image(tmp_path / name, 1)
    with pytest.raises(ValueError, match="is empty"):
        load_image(tmp_path / "empty.png", 1)
    with pytest.raises(FileNotFoundError, match=r"none\.png"):
        load_image(tmp_path / "none.png", 1)
    with pytest.raises(ValueError, match="1, 3 or 4 channels"):
        load_image(ROOT / "examples" / "seven.png", 5)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    with pytest.raises(ValueError, match=r"seven\.png has more than 600 pixels"):
        load_image(ROOT / "examples" / "seven.png", 1)


def test_a_transparent_color_of_16_bits_is_black(tmp_path):
    values = np.array([[0, 1000], [65_535, 30_000]], np.uint16)
    chunk = b"tRNS" + struct.pack(">H", 65_535)
    png = io.BytesIO()
    Image.fromarray(values).save(png, "PNG")
    data = png.getvalue()
    place = data.index(b"IDAT") - 4
    trns = struct.pack(">I", 2) + chunk + struct.pack(">I", zlib.crc32(chunk))
    (tmp_path / "a.png").write_bytes(data[:place] + trns + data[place:])
    gray = load_image(tmp_path / "a.png", 1)[0]
    assert (gray[1, 0], gray[0, 1] > 0, gray[1, 1] > 0) == (0, True, True)
    assert load_image(tmp_path / "a.png", 4)[3].tolist() == [[255, 255], [0, 255]]


def test_darkness_counts_in_all_colors_and_in_them_alone():
    dim = torch.full((1, 4, 6, 6), 15.0)
    dim[:, 3] = 255  # opaque
    cells, opaque = (0.05, 0.05, 0.05), (1.0,)
    deviations = (0.1, 0.1, 0.1, 0.01)
    assert unlike_training(dim, cells + opaque, deviations) == -1
    # As bright as the training images, though the opacity alone has a high mean.
    assert unlike_training(dim, (0.05, 0.05, 0.05, 1.0), (0.005, 0.005, 0.005, 0.01)) == 0
    glowing = dim.clone()
    glowing[:, 1, 2, 2] = 200
    assert unlike_training(glowing, cells + opaque, deviations) == 0
    assert unlike_training(glowing[:, :3], (0.05,), (0.1,)) == 0
    assert unlike_training(dim[:, :3], (0.05,), (0.1,)) == -1
    assert unlike_training(dim * 0, cells + opaque, deviations) == 0  # black
    assert unlike_training(dim[:, :3], (0.5, 0.1, 0.1), (0.2, 0.2, 0.2)) == -1


def test_images_brighter_than_the_training_images():
    seen = torch.rand(4, 3, 16, 16, generator=torch.manual_seed(0)) * 255
    mean, std = seen.mean((0, 2, 3)) / 255, seen.std((0, 2, 3)) / 255
    dim = (mean / 16).tolist(), (std / 16).tolist()
    assert unlike_training(seen, *dim).tolist() == [1] * 4  # 12 bits in files of 16 were trained on
    assert unlike_training(seen / 16, *dim).tolist() == [0] * 4
    assert unlike_training(seen, mean.tolist(), std.tolist()).tolist() == [0] * 4
    one = seen / 16
    one[:, 0] *= 16  # in one color alone
    assert unlike_training(one, *dim).tolist() == [0] * 4
