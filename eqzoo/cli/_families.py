"""Which paper a network is from, and what the paper says of it."""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["PAPERS", "Claim", "Paper", "claim", "paper_of"]


@dataclass(frozen=True)
class Paper:
    """A paper: what its networks are called, authors and year, title, and where it is."""

    family: str
    short: str
    title: str
    url: str


@dataclass(frozen=True)
class Claim:
    """What a paper prints for a network: parameters, test error in percent and its spread; empty for no number."""

    paper: Paper
    parameters: str
    error: str
    spread: str


PAPERS = {
    "gcnn": Paper(
        "G-CNN",
        "Cohen and Welling, 2016",
        "Group Equivariant Convolutional Networks",
        "https://arxiv.org/abs/1602.07576",
    ),
    "attentive": Paper(
        "attentive",
        "Romero et al., 2020",
        "Attentive Group Equivariant Convolutional Networks",
        "https://arxiv.org/abs/2002.03830",
    ),
    "asc": Paper("ASC", "Diaconu and Worrall, 2019", "Affine Self Convolution", "https://arxiv.org/abs/1911.07704"),
    "gsa": Paper(
        "GSA-Net",
        "Romero and Cordonnier, 2021",
        "Group Equivariant Stand-Alone Self-Attention for Vision",
        "https://arxiv.org/abs/2010.00977",
    ),
    "e4": Paper(
        "E4-Net",
        "He et al., 2021",
        "Efficient Equivariant Network",
        "https://proceedings.neurips.cc/paper/2021/file/2a79ea27c279e471f4d180b08d62b00a-Paper.pdf",
    ),
}

_FAMILIES = {
    "allcnn": "attentive",
    "asc_resnet": "asc",
    "e4_resnet": "e4",
    "e4net": "e4",
    "gcnn": "gcnn",
    "gsanet": "gsa",
    "pcam_densenet": "attentive",
    "resnet44": "attentive",
}


def paper_of(model: str, module: str) -> Paper | None:
    """The paper that a network is from, by its name and the file that it is in; None for networks of one's own.

    Example:
        >>> paper_of("p4_alpha_cnn", "gcnn").short, paper_of("p4_cnn", "gcnn").short
        ('Romero et al., 2020', 'Cohen and Welling, 2016')
    """
    if module not in _FAMILIES:
        return None
    return PAPERS["attentive" if "_alpha" in model else _FAMILIES[module]]


def claim(checkpoint: str) -> Claim | None:
    """What its paper prints for a checkpoint, or None for one that is in no paper."""
    return _claims().get(checkpoint)


@cache
def _claims() -> dict[str, Claim]:
    # Inside an installed package, or in the clone around it.
    package = Path(__file__).resolve().parents[1]
    path = package / "papers.csv" if (package / "papers.csv").is_file() else package.parent / "training" / "papers.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return {
            row["checkpoint"]: Claim(PAPERS[row["paper"]], row["parameters"], row["error"], row["spread"])
            for row in csv.DictReader(file)
        }
