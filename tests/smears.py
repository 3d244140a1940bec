"""Blood smears of noise, in the layout of Chula RBC-12: test images that need no download."""

import numpy as np
from PIL import Image


def save_smears(folder, numbers):
    """Writes smears of 160 x 120 pixels with these numbers, with a cell of every class at the corners and inside."""
    random = np.random.RandomState(0)
    for name in ("Dataset", "Label"):
        (folder / name).mkdir(parents=True)
    for number in numbers:
        smear = random.randint(0, 255, (120, 160, 3), np.uint8)
        Image.fromarray(smear).save(folder / "Dataset" / f"{number}.jpg")
        lines = [f"{3 * k} {2 * k} {k}" for k in range(13)] + ["159 119 0", ""]
        (folder / "Label" / f"{number}.txt").write_text("\n".join(lines))
