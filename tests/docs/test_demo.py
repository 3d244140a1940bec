"""The demo: built, opened in a browser from the disk and from a server, drawn on, and compared with torch."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

from tests.page.test_page import SHOWN, demo_folder  # noqa: F401  the fixture
from tests.webdriver import browsing

STROKE = [(-50, -70), (10, -72), (55, -68), (35, -20), (10, 30), (-5, 80)]  # a seven, from the center of the pad


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_draw_rotate_and_classify(demo_folder, tmp_path):  # noqa: F811
    with browsing(tmp_path / "profile") as browser:
        browser.open((demo_folder / "index.html").as_uri())
        browser.wait(SHOWN)
        assert browser.text("#answer-0 .class") == "2"
        browser.click("#erase")
        browser.wait("return document.getElementById('detail').hidden")
        browser.draw("#pad", STROKE)
        browser.wait(SHOWN)
        assert browser.text("#answer-0 .class") == "7"
        assert "24 of 24 angles" in browser.text("#answer-0 .same")
        the_drawing_is_framed_as_mnist(browser)
        # The digits to choose are ones whose prediction by the plain network changes with the angle.
        for digit in "2457":
            browser.run("current = null")
            browser.click(f"[data-digit='{digit}']")
            browser.wait(SHOWN)
            assert browser.text("#answer-0 .class") == digit
            assert "24 of 24" in browser.text("#answer-0 .same")
            assert "24 of 24" not in browser.text("#answer-1 .same")
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(demo_folder)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            browser.open(f"http://127.0.0.1:{server.server_port}/")
            browser.wait(SHOWN)
        finally:
            server.shutdown()
        assert not [error for error in browser.errors() if "favicon" not in error]
    assert "sdk: static" in (demo_folder / "README.md").read_text()


def the_drawing_is_framed_as_mnist(browser):
    """The center of mass in the middle, and a box of 20 pixels around the digit."""
    ink = browser.run("return Array.from(current.views[0].seen.data).filter((_, i) => i % 4 === 0)")
    rows = [sum(ink[28 * y : 28 * (y + 1)]) for y in range(28)]
    columns = [sum(ink[x::28]) for x in range(28)]
    for sums in (rows, columns):
        assert abs(sum((i + 0.5) * value for i, value in enumerate(sums)) / sum(sums) - 14) < 0.3
    lengths = [
        sum(max(ink[i] for i in line) > 25 for line in lines)
        for lines in ([range(28 * y, 28 * y + 28) for y in range(28)], [range(x, 784, 28) for x in range(28)])
    ]
    assert 19 <= max(lengths) <= 22
