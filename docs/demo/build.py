"""Builds the demo into dist/: a page of `eqzoo page` with a drawing area, and what a Space of the Hub wants beside.

python docs/demo/build.py
"""

import argparse
from pathlib import Path

from eqzoo.page import write_page

HERE = Path(__file__).resolve().parent
INTRODUCTION = """<p>Two small networks classify the digit that you draw. Both were trained on the same digits, rotated
by any angle. <b>p4_cnn</b> is equivariant by construction: rotating the image by 90° does not change its prediction.
<b>z2_cnn</b> is a plain network with about as many parameters.</p>"""
# What a static Space of the Hugging Face Hub wants beside the page; other hosts do not mind it.
SPACE = """---
title: Rotate the digit
emoji: 🔄
colorFrom: blue
colorTo: yellow
sdk: static
pinned: false
license: mit
---

An equivariant network and a plain one classify the digit that you draw, at every angle.
"""


def main() -> None:
    """Builds the page."""
    parser = argparse.ArgumentParser(description="Builds the page into a folder that any static host serves.")
    parser.add_argument("--output", type=Path, default=HERE / "dist", help="the folder (default: docs/demo/dist)")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    write_page(
        "p4_cnn.rotmnist",
        output / "index.html",
        against="z2_cnn.rotmnist",
        title="Rotate the digit",
        introduction=INTRODUCTION,
        extra=(HERE / "draw.html").read_text(encoding="utf-8"),
    )
    (output / "README.md").write_text(SPACE, encoding="utf-8")
    print(f"wrote {output / 'index.html'}, {(output / 'index.html').stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
