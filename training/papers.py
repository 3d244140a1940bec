"""What the papers report for the networks here, for the cards and the tables; errors in percent."""

import csv
from dataclasses import dataclass
from pathlib import Path

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
        error: The test error in percent, as printed, or 100 minus the printed accuracy, with its spread; empty where
            the paper prints no number.
        parameters: The number of parameters, as printed.
        note: What has to be known beside the number.
    """

    paper: str
    error: str
    parameters: str
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
    "asc": Paper(
        "Diaconu and Worrall, 2019",
        "Affine Self Convolution",
        "https://arxiv.org/abs/1911.07704",
        """@misc{diaconu2019affine,
  title = {Affine Self Convolution},
  author = {Diaconu, Nichita and Worrall, Daniel E.},
  year = {2019},
  eprint = {1911.07704},
  archivePrefix = {arXiv}
}""",
    ),
    "gsa": Paper(
        "Romero and Cordonnier, 2021",
        "Group Equivariant Stand-Alone Self-Attention for Vision",
        "https://arxiv.org/abs/2010.00977",
        """@inproceedings{romero2021group,
  title = {Group Equivariant Stand-Alone Self-Attention for Vision},
  author = {Romero, David W. and Cordonnier, Jean-Baptiste},
  booktitle = {International Conference on Learning Representations},
  year = {2021}
}""",
    ),
    "e4": Paper(
        "He et al., 2021",
        "Efficient Equivariant Network",
        "https://proceedings.neurips.cc/paper/2021/file/2a79ea27c279e471f4d180b08d62b00a-Paper.pdf",
        """@inproceedings{he2021efficient,
  title = {Efficient Equivariant Network},
  author = {He, Lingshen and Chen, Yuxuan and Shen, Zhengyang and Dong, Yiming and Wang, Yisen and Lin, Zhouchen},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2021}
}""",
    ),
}

_ORIGINAL = "on the original rotated MNIST"
_SELECTED = f"{_ORIGINAL}; the authors' code trains on 12,000 digits, training and validation together, and keeps the"
_NOTES = {
    ("gcnn", "rotmnist"): _ORIGINAL,
    ("attentive", "rotmnist"): f"5 seeds, {_SELECTED} epoch that is best on the test digits",
    (
        "attentive",
        "cifar10",
    ): "the authors' code trains on all 50,000 pictures and keeps the epoch that is best on the test set",
    ("attentive", "pcam"): "the epoch chosen on validation data",
    ("gsa", "rotmnist"): f"{_ORIGINAL}; in the authors' code the test digits are the validation digits",
    ("gsa", "cifar10"): "in the authors' code the test set is the validation set",
    ("gsa", "pcam"): "the epoch chosen on validation data",
    ("e4", "rotmnist"): f"{_SELECTED} best test accuracy of the later epochs",
    ("e4", "cifar10"): "the authors' code reports the best test accuracy of all epochs",
    ("e4", "cifar100"): "the authors' code reports the best test accuracy of all epochs",
    ("asc", "cifar10"): "8 seeds, 45,000 training and 5,000 validation pictures",
    ("asc", "cifar100"): "8 seeds, 45,000 training and 5,000 validation pictures",
}


def _read() -> dict[str, Row]:
    rows = {}
    with Path(__file__).with_name("papers.csv").open() as file:
        for entry in csv.DictReader(file):
            dataset = entry["checkpoint"].partition(".")[2].removesuffix("_aug")
            error = " ± ".join(part for part in (entry["error"], entry["spread"]) if part)
            rows[entry["checkpoint"]] = Row(entry["paper"], error, entry["parameters"], _NOTES[entry["paper"], dataset])
    return rows


ROWS = _read()
