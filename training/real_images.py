"""What the study of land and cells compares, and the rows of its runs."""

from pathlib import Path
from typing import Any, NamedTuple

from common import read_table

NAME = "real_images"


class Comparison(NamedTuple):
    """An equivariant network and a plain one, and what they are fine-tuned on.

    Args:
        data: The data set.
        side: The side of its images, in pixels.
        title: What is compared, for the page.
        equivariant: The name of the equivariant network.
        plain: The name of the plain network.
        start: The data set whose weights both start from.
        scores: What is reported: the classes of cells are unequal.
    """

    data: str
    side: int
    title: str
    equivariant: str
    plain: str
    start: str
    scores: tuple[str, ...]

    @property
    def arms(self) -> "tuple[Arm, ...]":
        """The networks and how each is trained; they alternate, for a study that is interrupted."""
        kinds = ((self.equivariant, "steps"), (self.plain, "steps"), (self.plain, "minutes"))
        return tuple(Arm(network, augment, budget) for augment in AUGMENTATIONS for network, budget in kinds)


COMPARISONS = {
    "eurosat": Comparison(
        "eurosat", 32, "EuroSAT, 32 x 32", "p4_resnet29", "z2_resnet29", "cifar10", ("accuracy",)
    ),
    "eurosat_p4m": Comparison(
        "eurosat", 32, "EuroSAT with p4m_resnet29, 32 x 32", "p4m_resnet29", "z2_resnet29", "cifar10", ("accuracy",)
    ),
    "chula_rbc12": Comparison(
        "chula_rbc12", 40, "Chula RBC-12, 40 x 40", "p4_resnet29", "z2_resnet29", "cifar10", ("accuracy", "macro_f1")
    ),
    "chula_rbc12_p4m": Comparison(
        "chula_rbc12", 40, "Chula RBC-12 from weights of EuroSAT, 40 x 40", "p4m_resnet29", "z2_resnet29", "eurosat",
        ("accuracy", "macro_f1"),
    ),
}  # fmt: skip
STEPS = {1: 80, 3: 96, 10: 120, 30: 160, 100: 240}  # by the percentage of the training images
SPREAD_BELOW = 10  # percent: smaller fractions are run with all seeds, the others with the first
BATCH, EPOCHS = 64, 4
CHOICE_SIZE = 500
AUGMENTATIONS = {"affine": ", augmented", "none": ""}
# The SHA-256 of the weights that rows without "start_sha256" started from. Both of CIFAR-10 are others by now.
FIRST_STARTS = {
    "p4_resnet29.cifar10": "a585311e8353adbc90b42f679d4bf2c2af255538c168e35432d948e41690cda4",
    "z2_resnet29.cifar10": "4278fac989f996904734318568f1a4dd62a049d4ebd7723d00bc4aa5ed64f676",
    "p4m_resnet29.eurosat": "dc6a73abad575f51c5576a255231471d4dd27a8c758c8943d5cceeb2169b87b9",
    "z2_resnet29.eurosat": "654e50579147f75b8fe11c2e228a7d199f4d1d94b2088d660dfdd354849f566b",
}


class Arm(NamedTuple):
    """A network and how it is trained.

    Args:
        network: Its name.
        augment: The augmentation of training images.
        budget: ``"steps"`` for the steps of a fraction, ``"minutes"`` for the time that the equivariant network takes.
    """

    network: str
    augment: str
    budget: str

    @property
    def title(self) -> str:
        """The network and the augmentation."""
        return f"{self.network}{AUGMENTATIONS[self.augment]}"


class Cell(NamedTuple):
    """A run of the study: an arm of a comparison on a part of the data set, with a seed."""

    data: str  # the name of the comparison
    percent: int
    seed: int
    arm: Arm

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the row of the run."""
        return {"data": self.data, "percent": self.percent, "seed": self.seed, **self.arm._asdict()}


def start_of(run: dict[str, Any]) -> tuple[str, str | None]:
    """The checkpoint that a run started from, and the SHA-256 of its weights then."""
    name = f"{run['network']}.{COMPARISONS[run['data']].start}"
    return name, run.get("start_sha256", FIRST_STARTS.get(name))


def read(folder: Path) -> dict[str, Any]:
    """The rows so far, and where they were made."""
    return read_table(folder / f"{NAME}.json", precision={}, step_seconds={})
