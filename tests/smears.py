"""Blood smears drawn by code, in the layout of Chula RBC-12: test images that need no download."""

from pathlib import Path

import numpy as np
from PIL import Image

__all__ = ["draw_smears"]

NUMBERS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11)  # the classes, by their numbers in the data set
STEP = 80  # pixels between the centers of cells
COLUMNS, ROWS = 8, 6


def draw_smears(folder: Path, numbers: tuple[int, ...], seed: int = 0) -> None:
    """Writes ``Dataset/<number>.jpg`` and ``Label/<number>.txt``: smears of 640 x 480 pixels with 48 cells each.

    A cell is an ellipse with a pale center and waves at its edge; radius, axes, pallor and waves depend on its class,
    and every cell has its own angle and noise.

    Args:
        folder: The folder to write to.
        numbers: The numbers of the smears, which determine their parts of the split.
        seed: The seed of angles, places and noise.
    """
    random = np.random.RandomState(seed)
    for name in ("Dataset", "Label"):
        (folder / name).mkdir(parents=True)
    for number in numbers:
        smear = np.full((ROWS * STEP, COLUMNS * STEP, 3), (110.0, 140.0, 160.0))
        lines = []
        for place in range(ROWS * COLUMNS):
            label = place % len(NUMBERS)
            x, y = (STEP * cell + STEP // 2 + random.randint(-6, 7) for cell in (place % COLUMNS, place // COLUMNS))
            top, left = place // COLUMNS * STEP, place % COLUMNS * STEP
            _draw(smear[top : top + STEP, left : left + STEP], x - left, y - top, label, random.uniform(0, 2 * np.pi))
            lines.append(f"{x} {y} {NUMBERS[label]}")
        noisy = smear + random.normal(0, 3, smear.shape)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / "Dataset" / f"{number}.jpg", quality=95)
        (folder / "Label" / f"{number}.txt").write_text("\n".join(lines) + "\n")


def _draw(smear: np.ndarray, x: int, y: int, label: int, angle: float) -> None:
    """Draws a cell at row y and column x of a part of the smear."""
    rows, columns = np.mgrid[: smear.shape[0], : smear.shape[1]]
    along = (columns - x) * np.cos(angle) + (rows - y) * np.sin(angle)
    across = (rows - y) * np.cos(angle) - (columns - x) * np.sin(angle)
    stretch, waves, pallor = 1 + 0.5 * (label % 2), 0.15 * (label % 3), 60 * (label % 4) / 3
    distance = np.hypot(along / stretch, across) / (14 + label)
    edge = 1 + waves * np.sin(9 * np.arctan2(across, along))
    inside = np.clip(8 * (edge - distance), 0, 1)[..., None]
    color = np.array([120.0, 70.0, 110.0]) + (pallor * np.clip(1 - 2 * distance, 0, 1))[..., None]
    smear += inside * (color - smear)
