"""The demo page: built, opened in a browser without a window, drawn on, rotated and compared with torch."""

import os
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import eqzoo
from tests import forks
from tests.conftest import ROOT
from tests.webdriver import browsing, installed

STROKE = [(-50, -70), (10, -72), (55, -68), (35, -20), (10, 30), (-5, 80)]  # a seven, from the center of the pad
RIGHT = "\ue014"
READ = "return NETWORKS.every((n) => n.probabilities) && !busy"


def missing(reason):
    """Skips, except where the page has to be tested."""
    if os.environ.get("EQZOO_NEED_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def page(tmp_path):
    """The built page's folder."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    if not installed():
        missing("no chromium with chromedriver here")
    ran = forks.run(forks.script, ROOT / "docs" / "demo" / "build.py", "--output", tmp_path / "dist")
    if ran.returncode == 2:
        missing(ran.stderr)
    assert ran.returncode == 0, ran.stderr
    return tmp_path / "dist"


def test_draw_rotate_and_classify(page, tmp_path):
    with browsing(tmp_path / "profile") as browser:
        browser.open((page / "index.html").as_uri())
        draw_rotate_and_classify(browser)
        the_page_computes_what_the_package_does(browser)
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(page)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            browser.open(f"http://127.0.0.1:{server.server_port}/")
            browser.wait(READ)
        finally:
            server.shutdown()
        assert not [error for error in browser.errors() if "favicon" not in error]
    assert "sdk: static" in (page / "README.md").read_text()


def draw_rotate_and_classify(browser):
    browser.wait(READ)
    browser.click("#clear")
    browser.wait("return !NETWORKS[0].probabilities")
    assert browser.text("#card-p4 .digit") == "–"
    assert browser.text("#status") == "Draw or choose a digit."
    browser.draw("#pad", STROKE)
    browser.wait(READ)
    assert browser.text("#card-p4 .digit") == "7"
    unrotated = browser.text("#card-p4")
    browser.keys("#angle", RIGHT * 9)  # steps of 10 degrees, at the keyboard
    assert browser.text("#angle-text") == "90°"
    assert browser.text("#card-p4") == unrotated
    assert "36 of 36 angles" in unrotated
    assert "probability of 7" in browser.text("#chart")
    assert browser.run("return document.querySelectorAll('#chart polyline').length") == 2
    # The digits to choose are ones whose prediction by the plain network changes with the angle.
    browser.click("[data-digit='2']")
    browser.wait(READ + " && NETWORKS[0].probabilities[0][2] > 0.5")
    assert "36 of 36" in browser.text("#card-p4 .same")
    assert "36 of 36" not in browser.text("#card-z2 .same")
    browser.click("#play")
    browser.wait("return document.getElementById('angle').value !== '90'")
    browser.click("#play")
    assert browser.run("return document.body.scrollWidth <= window.innerWidth")


@torch.no_grad()
def the_page_computes_what_the_package_does(browser):
    images = torch.tensor(browser.run("return images.map((p) => Array.from(p))")).reshape(36, 1, 28, 28)
    assert images.amax() > 0.9
    for k in range(1, 4):
        assert torch.equal(images[9 * k :], images[: 36 - 9 * k].rot90(k, (2, 3)))
    # MNIST's frame: the center of mass in the middle, and a box of 20 pixels around the digit before rotation.
    digit = images[0, 0] / images[0].sum()
    places = torch.arange(28) + 0.5
    for weights in (digit.sum(0), digit.sum(1)):
        assert abs((weights * places).sum() - 14) < 0.2
    rows, columns = (digit > 0.05 * digit.max()).nonzero(as_tuple=True)
    assert 19 <= max(rows.max() - rows.min(), columns.max() - columns.min()) + 1 <= 22
    for k, name in enumerate(("p4_cnn", "z2_cnn")):
        model = eqzoo.create_model(name, pretrained=True).double().eval()
        cfg = model.pretrained_cfg
        expected = model((images - cfg["mean"][0]) / cfg["std"][0]).softmax(1)
        found = torch.tensor(browser.run(f"return NETWORKS[{k}].probabilities"))
        assert (found - expected).abs().max() < 1e-4
