"""The page of a network in a browser: its pixels, predictions, table and curve beside those of the package."""

import base64
import csv
import gzip
import io
import os
import re
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import eqzoo
from eqzoo.cli.main import main
from eqzoo.data import load_image, preprocess
from eqzoo.data.brightness import unlike_training
from eqzoo.hub import fetch_npm
from eqzoo.page import write_page, writing
from tests import forks
from tests.conftest import ROOT, SHARED
from tests.data.tiffs import tiff
from tests.digits import drawn_digits
from tests.webdriver import browsing, installed

ENTER, HOME, RIGHT = "\ue007", "\ue011", "\ue014"
ERASE = "\ue009a\ue009\ue003"  # control and a, backspace
DONE = "return items.length && items.every((item) => item.probabilities || item.error) && !planned"
SHOWN = "return current && current.views.every(Boolean)"
# Runs a function of pixels.js where the page runs them, in a worker.
PROBE = """
const [text, channels, size, angle, reflected] = arguments;
const blob = new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))]);
const more = `onmessage = async ({ data: [blob, channels, size, angle, reflected] }) => {
  try {
    const image = await decode(blob, channels);
    const seen = size ? view(image, [channels, ...size], angle, reflected) : image;
    postMessage([seen.height, seen.width, seen.planes.map((plane) => Array.from(plane))]);
  } catch (error) { postMessage(error.message); }
};`;
const worker = new Worker(URL.createObjectURL(new Blob([element("worker").textContent, "\\n", more])));
return new Promise((resolve) => {
  worker.onmessage = ({ data }) => { worker.terminate(); resolve(data); };
  worker.postMessage([blob, channels, size, angle, reflected]);
});
"""


def missing(reason):
    """Skips, except where the page has to be tested."""
    if os.environ.get("EQZOO_NEED_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


def need_browser():
    """Skips without a browser, the packages of the export, or ONNX Runtime Web."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    if not installed():
        missing("no chromium with chromedriver here")
    try:
        fetch_npm(*writing._RUNTIME)
    except OSError as error:
        missing(str(error))


@pytest.fixture(scope="session")
def demo_folder(made_once):
    """The folder of the built demo, a page of p4_cnn against z2_cnn with a drawing area."""
    need_browser()

    def build(folder):
        ran = forks.run(forks.script, ROOT / "docs" / "demo" / "build.py", "--output", folder)
        assert ran.returncode == 0, ran.stderr

    return made_once("demo", build)


@pytest.fixture(scope="module")
def browser(demo_folder, tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile")) as found:
        found.open((demo_folder / "index.html").as_uri())
        yield found


def probe(browser, path, channels, size=None, angle=0, reflected=False):
    found = browser.run(PROBE, base64.b64encode(path.read_bytes()).decode(), channels, size, angle, reflected)
    if isinstance(found, str):
        raise ValueError(found)
    height, width, planes = found
    return torch.tensor(planes, dtype=torch.float64).reshape(channels, height, width)


@pytest.fixture(scope="module")
def smooth():
    """A smooth image (57, 83, 4), uint8, with opacity from 0 to 255."""
    small = np.random.default_rng(0).integers(0, 256, (6, 8, 4)).astype(np.uint8)
    return np.stack([np.asarray(Image.fromarray(small[..., c]).resize((83, 57), 3)) for c in range(4)], -1)


def masked(image):
    """A page of a TIFF that is a mask by its tag, as large as the image."""
    page = image.copy()
    page.encoderinfo = {"tiffinfo": {254: 4}}
    return page


def image_files(smooth, folder):
    """Files of the formats that pages read, by name, and the largest difference of a pixel from eqzoo.data."""
    deep = smooth[..., 0].astype(np.uint16) * 257 // 4 + 90
    oriented = [Image.Exif() for _ in range(9)]
    for number, exif in enumerate(oriented):
        exif[274] = number
    color, gray, sixteen = Image.fromarray(smooth[..., :3]), Image.fromarray(smooth[..., 1]), Image.fromarray(deep)
    saved = {
        "color.png": (color, {}, 0),
        "opacity.png": (Image.fromarray(smooth), {}, 0),
        "palette.png": (color.quantize(64), {}, 0),
        "sixteen.png": (sixteen, {}, 1e-4),
        "clear.png": (sixteen, {"transparency": int(deep[20, 30])}, 1e-4),
        "oriented.png": (sixteen, {"exif": oriented[5]}, 1e-4),
        "rotated.png": (color, {"exif": oriented[7]}, 0),
        "rotated.jpg": (color, {"exif": oriented[6]}, 0),
        "rotated.webp": (color, {"exif": oriented[8], "lossless": True}, 0),
        **{f"oriented{number}.tif": (gray, {"tiffinfo": {274: number}}, 0) for number in range(2, 9)},
        "gray.jpg": (gray, {}, 0),
        "lossy.webp": (color, {}, 0),
        "color.tif": (color, {"compression": "tiff_lzw"}, 0),
        "opacity.tif": (Image.fromarray(smooth), {"compression": "packbits"}, 0),
        "strips.tif": (color, {"tiffinfo": {278: 10}}, 0),
        "deflated.tif": (color, {"tiffinfo": {278: 10}, "compression": "tiff_adobe_deflate"}, 0),
        "masked.tif": (color, {"save_all": True, "append_images": [masked(gray)]}, 0),
        "sixteen.tif": (sixteen, {"compression": "tiff_adobe_deflate"}, 1e-4),
    }
    for name, (image, options, bound) in saved.items():
        image.save(folder / name, **options)
        yield folder / name, bound


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_files_are_decoded_as_load_image_does(browser, smooth, tmp_path, channels):
    for path, bound in image_files(smooth, tmp_path):
        if (path.name, channels < 4) == ("opacity.tif", True):
            bound = 1  # rounded once more, onto black
        expected = load_image(path, channels)
        assert expected.std() > 10
        found = probe(browser, path, channels)
        assert found.shape == expected.shape, path.name
        assert (found - expected).abs().max() <= bound, path.name


def test_files_that_would_be_read_wrongly_are_errors(browser, smooth, tmp_path):
    gray = Image.fromarray(smooth[..., 0])
    Image.fromarray(smooth[..., 0].astype(np.float32)).save(tmp_path / "float.tif")
    gray.save(tmp_path / "stack.tif", save_all=True, append_images=[gray])
    color = Image.fromarray(smooth[..., :3])
    color.save(tmp_path / "jpeg.tif", compression="jpeg")
    opacity = Image.fromarray(smooth)
    opacity.save(tmp_path / "opacity.tif")
    data, entry = (tmp_path / "opacity.tif").read_bytes(), b"\x52\1\3\0\1\0\0\0"  # of the meaning of the fourth band
    assert entry + b"\2" in data
    for meaning, name in ((b"\0", "other.tif"), (b"\1", "multiplied.tif")):
        (tmp_path / name).write_bytes(data.replace(entry + b"\2", entry + meaning))
    color.save(tmp_path / "color.tif")
    (tmp_path / "cut.tif").write_bytes((tmp_path / "color.tif").read_bytes()[:-4000])
    (tmp_path / "large.tif").write_bytes(b"II+\0" + bytes(60))
    data = (tmp_path / "color.tif").read_bytes()
    first = int.from_bytes(data[4:8], "little")
    last = first + 2 + 12 * int.from_bytes(data[first : first + 2], "little")  # where the next page is
    (tmp_path / "circle.tif").write_bytes(data[:last] + data[4:8] + data[last + 4 :])
    values = smooth[..., :1]
    for name, options in {
        "colors": {"t262": [3], "t320": [*range(256)] * 3}, "deep": {"t32997": [2]}, "small": {"t254": [1], "t330": [8]}
    }.items():  # fmt: skip
        (tmp_path / f"{name}.tif").write_bytes(tiff((values, options)))
    gray.save(tmp_path / "imagej.tif", tiffinfo={270: "ImageJ=1.11a\nimages=3\n"})
    color.save(tmp_path / "strips.tif", tiffinfo={278: 10}, compression="tiff_adobe_deflate")
    data = bytearray((tmp_path / "strips.tif").read_bytes())
    data[100] ^= 255
    (tmp_path / "damaged.tif").write_bytes(data)
    Image.fromarray(smooth[..., 0].astype(np.uint16) * 257).save(tmp_path / "sixteen.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "sixteen.png").read_bytes()[:-1000])
    for kind in ("png", "gif", "webp"):
        color.save(tmp_path / f"moving.{kind}", save_all=True, append_images=[opacity.convert("RGB").rotate(90)])
    color.save(tmp_path / "apart.png", save_all=True, default_image=True, append_images=[color.rotate(90)])
    (tmp_path / "long.tif").write_bytes(tiff((smooth[..., :3], {"deflate": True, "t257": [50], "t278": [50]})))
    Image.new("L", (70_000, 20), 200).save(tmp_path / "wide.png")
    (tmp_path / "text.png").write_text("no image")
    refused = {
        "float.tif": "not supported", "jpeg.tif": "not supported", "stack.tif": "a stack of 2", "cut.tif": "cut off",
        "other.tif": "not supported", "multiplied.tif": "not supported",
        "colors.tif": "not supported", "deep.tif": "a stack", "imagej.tif": "a stack", "small.tif": "thumbnail",
        "circle.tif": "in a circle", "damaged.tif": "damaged", "large.tif": "BigTIFF", "cut.png": "cut off",
        "apart.png": "animation of 2", "long.tif": "damaged",
        "moving.png": "animation of 2", "moving.gif": "animation of 2", "moving.webp": "animation of 2",
        "wide.png": "more pixels", "text.png": "",
    }  # fmt: skip
    for name, words in refused.items():
        with pytest.raises(ValueError, match=words):
            probe(browser, tmp_path / name, 1)
    still = tmp_path / "still.gif"
    color.save(still)
    assert probe(browser, still, 3).shape == (3, 57, 83)
    color.save(tmp_path / "counts.tif", tiffinfo={278: 10})
    data = bytearray((tmp_path / "counts.tif").read_bytes())
    entry = data.index(struct.pack("<HHI", 279, 4, 6))  # of the bytes of each strip
    (place,) = struct.unpack_from("<I", data, entry + 8)
    data[place : place + 24] = bytes(24)
    (tmp_path / "counts.tif").write_bytes(data)
    expected = torch.from_numpy(smooth[..., :3]).permute(2, 0, 1).double()
    assert torch.equal(probe(browser, tmp_path / "counts.tif", 3), expected)


@pytest.mark.parametrize("size", [(32, 32), (100, 100), (40, 60), (57, 83)], ids=str)
def test_views_are_those_of_preprocess_and_rotate(browser, smooth, tmp_path, size):
    Image.fromarray(smooth[..., :3]).save(tmp_path / "color.png")
    image = load_image(tmp_path / "color.png", 3).double()
    for angle, reflected in [(0, False), (90, True), (270, False), (45, False), (135, True), (200, False)]:
        quarters = round(angle / 90)
        moved = (image.flip(2) if reflected else image).rot90(quarters, (1, 2))
        expected = eqzoo.rotate(preprocess(moved, size).round()[None], angle - 90 * quarters)[0]
        found = probe(browser, tmp_path / "color.png", 3, size, angle, reflected)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
        if angle:  # negative control
            assert (found - probe(browser, tmp_path / "color.png", 3, size)).abs().max() > 1


@pytest.fixture(scope="module")
def classified(browser, tmp_path_factory):
    """A folder of 200 digits and a broken file, which the page has classified, with a threshold for eights."""
    folder = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0).normal(0, 40, (200, 28, 28))
    for i, image in enumerate(drawn_digits(200).images[:, 0].numpy() * 0.7 + noise):
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).resize((40, 36)).save(folder / f"digit{i:03}.png")
    (folder / "broken.png").write_text("no image")
    browser.keys("#files", "\n".join(map(str, sorted(folder.iterdir()))))
    browser.wait(DONE, seconds=300)
    browser.run("document.querySelector('details').open = true")
    browser.keys("[name='8']", "0.01")
    browser.wait(DONE)
    return folder


def test_predictions_are_those_of_eqzoo_predict(browser, classified, capsys):
    assert "200 of 201 images classified; 1 cannot be read" in browser.text("#count")
    words = ["predict", str(classified), "--model", "p4_cnn", "z2_cnn", "--threshold", "8=0.01", "--csv"]
    main(words)
    expected = {row["file"].rpartition("/")[2]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    found = {row["file"]: row for row in csv.DictReader(io.StringIO(browser.run("return csv()")))}
    assert found.pop("broken.png")["p4_cnn.rotmnist 0"] == ""
    assert found.keys() == expected.keys()
    for name, row in found.items():
        for network in ("p4_cnn", "z2_cnn"):
            theirs = [value for key, value in expected[name].items() if key.startswith(network)]
            mine = [value for key, value in row.items() if key.startswith(network)]
            assert mine[0] == theirs[0]
            close(mine[1:], theirs[1:], 1e-3)  # a pixel half way between two values may be rounded to the other one
    predicted = [row["p4_cnn.rotmnist"] for row in found.values()]
    assert len(set(predicted)) > 5
    most_probable = [
        max(map(str, range(10)), key=lambda k: float(row[f"p4_cnn.rotmnist {k}"])) for row in found.values()
    ]
    assert predicted != most_probable  # the threshold changes some


def test_images_come_by_dropping_and_pasting(browser, classified, tmp_path):
    listed = ["a/0.png", "a/10.png", "a/inner/1.png", "a/z.png"]
    for name in (*listed, "a/.2.png", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((classified / "digit000.png").read_bytes())
    before = browser.run("return items.length")
    browser.drop([classified / "digit000.png", tmp_path / "a"])
    browser.wait(f"return items.length === {before} + 5")
    browser.run(
        "const data = new DataTransfer(); data.items.add(new File([items[1].blob], 'image.png'));"
        "for (const _ of '12') document.dispatchEvent(new ClipboardEvent('paste', { clipboardData: data }));"
    )
    browser.wait(DONE)
    names = browser.run(f"return items.slice({before}).map((item) => item.name)")
    assert names == ["digit000.png (2)", *listed, "image.png", "image.png (2)"]
    assert browser.run(f"return items.slice({before}).map((item) => item.error ?? '')") == [""] * 7
    assert browser.run("return leftOut") == 1
    browser.run(f"for (const item of items.splice({before})) names.delete(item.name); leftOut = 0; update()")
    browser.wait(DONE)


def test_brightness_is_told_as_predict_tells_it(browser):
    script = """
    const [images, mean, std] = arguments;
    const more = "onmessage = ({ data: [images, mean, std] }) => postMessage(images.map((planes) => "
      + "brightness({ planes: planes.map((plane) => Float32Array.from(plane)) }, mean, std)));";
    const worker = new Worker(URL.createObjectURL(new Blob([element("worker").textContent, "\\n", more])));
    return new Promise((resolve) => {
      worker.onmessage = ({ data }) => { worker.terminate(); resolve(data); };
      worker.postMessage([images, mean, std]);
    });"""
    torch.manual_seed(0)
    largest = torch.tensor([0.0, 5, 20, 31, 32, 40, 100, 200, 255])[:, None, None, None]
    images = torch.cat([torch.rand(9, 3, 40, 40) * largest, 255 - torch.rand(9, 3, 40, 40) * largest])
    images[::4, :, 0, 0] = 255  # single pixels that are saturated
    for mean, std in (((0.5, 0.4, 0.6), (0.2, 0.2, 0.2)), ((0.05, 0.06, 0.08), (0.05, 0.05, 0.05))):
        expected = unlike_training(images, mean, std)
        assert {*expected.tolist()} == {-1, 0, 1} or mean[0] == 0.5
        assert browser.run(script, images.flatten(2).tolist(), mean, std) == expected.tolist()


def test_images_of_12_bits_in_16_are_told(browser, classified, tmp_path):
    before = browser.run("return items.length")
    values = np.asarray(Image.open(classified / "digit001.png")).astype(np.uint16)
    for factor, told in ((257, 0), (16, 1)):
        Image.fromarray(values * factor).save(tmp_path / f"{factor}.png")
        browser.keys("#files", str(tmp_path / f"{factor}.png"))
        browser.wait(DONE)
        assert browser.run("return element('notes').children.length") == told
    assert "16.png" in browser.text("#notes")
    browser.run(f"for (const item of items.splice({before})) names.delete(item.name); update()")
    browser.wait(DONE)


def test_folders_that_drives_make_are_ignored(browser, tmp_path):
    for name in ("a/0.png", "a/.0.png", "a/@eaDir/0.png/small.png", "lost+found/0.png", "a/notes.txt"):
        (tmp_path / ".mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".mine" / name).write_bytes((ROOT / "examples" / "seven.png").read_bytes())
    browser.run("window.found = []; window.original = add; add = (files) => found.push(...files)")
    browser.keys("#folder", str(tmp_path / ".mine"))
    browser.wait("return found.length")
    assert browser.run("add = original; return found.map((file) => file.webkitRelativePath)") == [".mine/a/0.png"]
    assert browser.run("const before = leftOut; leftOut = 0; return before") == 1  # the text


def test_a_threshold_can_be_changed_in_the_page(browser, classified):
    count = "return items.filter((item) => classOf(item) === '8').length"
    before = browser.run(count)
    browser.keys("[name='8']", ERASE)
    assert 0 < browser.run(count) < before
    browser.keys("[name='8']", "0.01")
    assert browser.run(count) == before
    limits = "return [...THRESHOLDS.keys()].sort().join('')"
    for digit in "012345679":
        browser.keys(f"[name='{digit}']", "0.9")
    assert browser.run(limits) == "012345678"
    assert browser.run("return document.querySelector('#thresholds :invalid').validationMessage")
    browser.keys("[name='0']", ERASE)
    assert browser.run(limits) == "123456789"
    for digit in "12345679":
        browser.keys(f"[name='{digit}']", ERASE)
    assert browser.run(count) == before


def test_the_table_is_sorted_and_filtered_at_the_keyboard(browser, classified):
    names = "return [...document.querySelectorAll('#rows .name')].map((each) => each.textContent)"
    browser.keys("[data-sort=probability] button", ENTER)
    browser.wait("return document.querySelector('[data-sort=probability]').ariaSort === 'ascending'")
    surest = browser.run("return shown.map(surest)")
    assert surest == sorted(surest) != browser.run("return items.map(surest)")
    browser.keys("#filter", "cannot")
    browser.wait(f"{names}.length === 1")
    assert browser.run(names) == ["broken.png"]
    assert "cannot be read" in browser.text("#rows")
    browser.keys("#filter", HOME)
    browser.wait(f"{names}.length === 201")
    choose = "element('filter').value = arguments[0]; element('filter').dispatchEvent(new Event('input'))"
    browser.run(choose, "different")
    browser.wait("return shown.length < 200 && shown.length > 0 && shown.every(differs)")
    browser.run(choose, "")
    browser.wait(f"{names}.length === 201")
    browser.keys("#most", ERASE + "60")
    browser.wait("return shown.length < 200 && shown.every((item) => surest(item) <= 0.6)")
    browser.keys("#most", ERASE + "100")
    browser.keys("[data-sort=file] button", ENTER)
    browser.wait("return document.querySelector('[data-sort=file]').ariaSort === 'ascending'")
    assert browser.run(names)[:2] == ["broken.png", "digit000.png"]


def test_one_image_is_shown_at_all_angles(browser, classified):
    browser.keys("#rows tr:nth-child(3) .name", ENTER)
    browser.wait(SHOWN)
    assert browser.text("#detail-title") == "digit001.png"
    assert browser.run("return document.activeElement.id") == "detail-title"
    views = torch.tensor(browser.run("return current.views.map((view) => view.probabilities)"))
    changes = (views[:4] - views[:1]).abs().amax((0, 2))
    assert changes[0] < 1e-5 < 1e-3 < changes[1]  # the rotations; z2_cnn is the negative control
    image = preprocess(load_image(classified / "digit001.png", 1).double(), (28, 28)).round()[None]
    model = eqzoo.create_model("p4_cnn", pretrained=True).eval()
    mean, std = (model.pretrained_cfg[key][0] for key in ("mean", "std"))
    with torch.no_grad():
        for i, (angle, reflected) in enumerate(browser.run("return VIEWS")):
            seen = eqzoo.rotate(image.flip(3) if reflected else image, angle)
            assert (model((seen / 255 - mean) / std).softmax(1)[0] - views[i, 0]).abs().max() < 1e-4
    browser.keys("#angle", RIGHT * 6)  # 15 degrees each
    assert browser.text("#angle-text") == "90°"
    assert browser.run("return document.querySelectorAll('#chart polyline').length") == 2
    browser.click("#following")
    assert browser.text("#detail-title") == "digit002.png"
    browser.wait(SHOWN)


def test_a_broken_image_shows_nothing_of_another(browser, classified):
    assert browser.text("#answer-0 .share")
    browser.run("inspect(items.find((item) => item.error))")
    for _ in range(2):
        assert "cannot be read" in browser.text("#sentence")
        assert browser.text("#answer-0 .class") == "–"
        assert not any(browser.text(part) for part in ("#answer-0 .share", "#bars", "#chart"))
        browser.keys("#angle", RIGHT)
    assert browser.run("return document.querySelector('#previous').ariaDisabled") == "true"  # it comes first
    browser.click("#following")
    assert browser.text("#detail-title") == "digit000.png"
    browser.wait(SHOWN)
    browser.click("#previous")
    assert browser.text("#detail-title") == "digit000.png"


def test_an_image_whose_file_is_gone_keeps_its_prediction(browser, classified, tmp_path):
    shutil.copy(classified / "digit005.png", tmp_path / "gone.png")
    browser.keys("#files", str(tmp_path / "gone.png"))
    browser.wait(DONE)
    (tmp_path / "gone.png").unlink()
    browser.run("for (const { worker } of workers) worker.terminate(); workers.length = 0; startWorker()")  # forgets
    browser.run("inspect(items.at(-1))")
    browser.wait("return current.unseen")
    assert "cannot be read" in browser.text("#sentence")
    assert browser.run("return items.at(-1).labels.length") == 2
    assert browser.run("return element('csv').disabled") is False
    assert any("ERR_FILE_NOT_FOUND" in error for error in browser.errors())
    browser.run("names.delete(items.pop().name); inspect(items[1]); update()")
    browser.wait(SHOWN)
    browser.wait(DONE)


def test_the_focus_stays_while_images_are_classified(browser, classified):
    browser.run("document.querySelector('#rows tr:nth-child(9) .name').focus()")
    name = browser.run("return document.activeElement.textContent")
    browser.run("order = { key: 'probability', descending: true }; add([{ name: 'again', blob: items[3].blob }])")
    browser.wait(DONE)
    assert browser.run("return shown.length === 202 && shown[0].row === document.querySelector('#rows tr')")
    assert browser.run("return document.activeElement.textContent") == name
    browser.run("names.delete(items.pop().name); order = { key: 'file', descending: false }; update()")
    browser.wait(DONE)


def test_a_drawing_is_classified(browser, classified):
    drawing = "{ key: 'drawing', name: 'Your drawing', blob: items[2].blob }"
    shown = f"inspect({drawing}); return element('answer-0').querySelector('.share').textContent"
    browser.run("inspect(items[1])")
    browser.wait(SHOWN)
    assert browser.run(shown) == ""  # not that of the other image
    browser.click("#erase")
    browser.draw("#pad", [(0, -80), (0, 80)])
    browser.wait("return current?.name === 'Your drawing'")
    browser.wait(SHOWN)
    assert browser.text("#bars th") == "1"


def test_the_page_says_what_the_card_says(browser):
    about = browser.text("#about")
    assert re.search(r"accuracy\s+9\d\.\d\d % on 50,000 images of the test split \(95 % confidence interval", about)
    assert "limits and intended use" in about
    assert "license of the weights\nmit" in about


def test_the_page_fits_narrow_screens_and_cannot_connect(browser, classified):
    browser.call("/window/rect", {"width": 400, "height": 800})
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
    refused = browser.run(
        "return new Promise((resolve) => {"
        "document.addEventListener('securitypolicyviolation', (event) => resolve(event.effectiveDirective));"
        "fetch('https://example.org').catch(() => 0); })"
    )
    assert refused == "connect-src"
    assert not [error for error in browser.errors() if "Content Security Policy" not in error]


def test_networks_of_color_images_side_by_side(tmp_path, smooth, capsys):
    import onnx

    need_browser()
    files = [str(tmp_path / f"{name}.onnx") for name in ("color", "opacity")]
    for channels, file in zip((3, 4), files, strict=True):
        model = eqzoo.create_model("p4_cnn", in_chans=channels, num_classes=3).float().eval()
        model.pretrained_cfg["label_names"] = ("constructor", "a\u0308", "</script>")  # two letters for one
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        eqzoo.export_onnx(model, file)
    Image.fromarray(smooth).save(tmp_path / "image.png")
    limits = ["--threshold", "constructor=0.001", "--threshold", "\u00e4=0.99"]
    words = [files[0], str(tmp_path / "page.html"), "--against", files[1], *limits, "--title", "A <b>"]
    assert main(["page", *words]) == 0
    main(["predict", str(tmp_path / "image.png"), "--model", *files, *limits, "--csv"])
    _, expected = csv.reader(io.StringIO(capsys.readouterr().out.partition("file,")[2]))
    assert expected[1] == "constructor"
    with browsing(tmp_path / "profile") as browser:
        browser.open((tmp_path / "page.html").as_uri())
        browser.keys("#files", str(tmp_path / "image.png"))
        browser.wait(DONE)
        heading, found = csv.reader(io.StringIO(browser.run("return csv()")))
        assert browser.text("h1") == "A <b>"
        assert browser.run("return [...THRESHOLDS.keys()]") == ["constructor", "a\u0308"]
    assert [name for name in heading if " " not in name] == ["file", "color.onnx", "opacity.onnx"]
    assert (found[1], found[5]) == (expected[1], expected[5])
    close(found[2:5] + found[6:], expected[2:5] + expected[6:])
    proto = onnx.load(files[1])
    next(entry for entry in proto.metadata_props if entry.key == "classes").value = '["a", "b", "c"]'
    onnx.save(proto, files[1])
    with pytest.raises(ValueError, match="the same two or more classes"):
        write_page(files[0], tmp_path / "other.html", files[1])
    assert not (tmp_path / "other.html").exists()


def close(found, expected, bound=1e-4):
    assert len(found) == len(expected) > 1
    assert max(abs(float(a) - float(b)) for a, b in zip(found, expected, strict=True)) < bound


def test_a_network_that_does_not_start_is_told(demo_folder, tmp_path):
    page = (demo_folder / "index.html").read_text()
    broken = base64.b64encode(gzip.compress(b"no network")).decode()
    page = re.sub('(id="network-0">)[^<]*', lambda match: match[1] + broken, page)
    (tmp_path / "page.html").write_text(page)
    with browsing(tmp_path / "profile") as browser:
        browser.open((tmp_path / "page.html").as_uri())
        browser.keys("#files", str(ROOT / "examples" / "seven.png"))
        browser.wait("return failure && !planned")
        assert "did not start" in browser.text("#status")
        assert browser.run("return items.length === 1 && !items[0].error")


def test_a_page_needs_a_folder_and_a_name(tmp_path, monkeypatch):
    need_browser()
    with pytest.raises(FileNotFoundError, match="no folder"):
        write_page("p4_cnn", tmp_path / "missing" / "page.html")
    with pytest.raises(ValueError, match=r"ends in \.html"):
        write_page("p4_cnn", tmp_path / "network.onnx")
    shutil.copytree(ROOT / "model_cards" / "p4_cnn.rotmnist", tmp_path / "digits")
    monkeypatch.chdir(tmp_path / "digits")
    write_page(".", "page.html")
    assert "<h1>digits</h1>" in Path("page.html").read_text()


@pytest.mark.skipif(not (SHARED / "data" / "eurosat").is_dir(), reason="the data set is not here")
def test_real_tiles_have_the_predictions_of_eqzoo_predict(tmp_path, capsys):
    """Also of a file of 8 bits, which has the card of its network beside it."""
    need_browser()
    folder, tiles = tmp_path / "land", tmp_path / "tiles"
    tiles.mkdir()
    for path in sorted((SHARED / "data" / "eurosat").glob("*.zip")):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist())[-20:]:
                (tiles / Path(name).name).write_bytes(archive.read(name))
    (tiles / "broken.jpg").write_text("no image")
    shutil.copytree(ROOT / "model_cards" / "p4m_resnet_s.pbc", folder)
    assert main(["export", str(folder), str(folder / "eight.onnx"), "--int8", str(tiles)]) == 0
    for source, bound in ((folder, 1e-4), (folder / "eight.onnx", 5e-3)):
        capsys.readouterr()
        main(["predict", str(tiles), "--model", str(source), "--csv"])
        out = capsys.readouterr().out
        expected = {row["file"].rpartition("/")[2]: row for row in csv.DictReader(io.StringIO(out))}
        assert main(["page", str(source), str(tmp_path / "page.html")]) == 0
        with browsing(tmp_path / f"profile{bound}") as browser:
            browser.open((tmp_path / "page.html").as_uri())
            browser.keys("#folder", str(tiles))
            browser.wait("return items.length > 0")
            browser.wait(DONE, seconds=300)
            rows = list(csv.DictReader(io.StringIO(browser.run("return csv()"))))
            assert "of the test split" in browser.text("#about")
        assert len(rows) == 201
        for row in rows:
            *_, name = row.pop("file").split("/")
            if name != "broken.jpg":
                close(list(row.values())[1:], list(expected[name].values())[2:], bound)
