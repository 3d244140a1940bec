"""What the papers report for the networks here, for the cards and the tables; errors in percent."""

from dataclasses import dataclass

__all__ = ["PAPERS", "ROWS", "Paper", "Row"]


@dataclass(frozen=True)
class Paper:
    """A paper.

    Args:
        short: Authors and year.
        title: The title.
        url: Where it is.
        bibtex: The citation.
    """

    short: str
    title: str
    url: str
    bibtex: str


@dataclass(frozen=True)
class Row:
    """A row of a paper's table.

    Args:
        paper: The key in `PAPERS`.
        error: The test error in percent, as printed.
        note: What has to be known beside the number.
    """

    paper: str
    error: str
    note: str


PAPERS = {
    "gcnn": Paper(
        "Cohen and Welling, 2016",
        "Group Equivariant Convolutional Networks",
        "https://arxiv.org/abs/1602.07576",
        """@inproceedings{cohen2016group,
  title = {Group Equivariant Convolutional Networks},
  author = {Cohen, Taco S. and Welling, Max},
  booktitle = {International Conference on Machine Learning},
  year = {2016}
}""",
    ),
    "attentive": Paper(
        "Romero et al., 2020",
        "Attentive Group Equivariant Convolutional Networks",
        "https://arxiv.org/abs/2002.03830",
        """@inproceedings{romero2020attentive,
  title = {Attentive Group Equivariant Convolutional Networks},
  author = {Romero, David W. and Bekkers, Erik J. and Tomczak, Jakub M. and Hoogendoorn, Mark},
  booktitle = {International Conference on Machine Learning},
  year = {2020}
}""",
    ),
}

_SELECTED = (
    "on the original rotated MNIST; the authors' code trains on 12,000 digits, training and validation together, and "
    "keeps the epoch that is best on the test digits"
)
ROWS = {
    "z2_cnn.rotmnist": Row("gcnn", "5.03", "on the original rotated MNIST"),
    "p4_cnn.rotmnist": Row("attentive", "2.048 ± 0.045", f"5 seeds, {_SELECTED}"),
}
