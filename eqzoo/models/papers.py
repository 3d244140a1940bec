"""The papers that the networks are from, and what their tables print; errors in percent."""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import timm


@dataclass(frozen=True)
class Paper:
    """A paper.

    Args:
        family: The name of its networks in tables.
        short: Authors and year.
        title: The title.
        url: The address of the paper.
        bibtex: The citation.
    """

    family: str
    short: str
    title: str
    url: str
    bibtex: str


@dataclass(frozen=True)
class Row:
    """A row of a paper's table.

    Args:
        paper: The key in `PAPERS`.
        error: The test error in percent, as printed, or 100 minus the printed accuracy; empty where the paper prints
            no number.
        spread: The spread of the error, as printed; may be empty.
        parameters: The number of parameters, as printed; may be empty.
        note: How the paper's number was chosen, or on which data.
    """

    paper: str
    error: str
    spread: str
    parameters: str
    note: str

    @property
    def error_text(self) -> str:
        """The error with its spread, such as ``1.290 ± 0.023``."""
        return " ± ".join(part for part in (self.error, self.spread) if part)


def _paper(family: str, short: str, title: str, url: str, key: str, author: str, venue: str = "") -> Paper:
    """A paper with its citation, as of the proceedings of a conference or else of arXiv."""
    year = f"year = {{{short[-4:]}}}"
    arxiv = [year, f"eprint = {{{url.rpartition('/')[2]}}}", "archivePrefix = {arXiv}"]
    fields = [
        f"title = {{{title}}}",
        f"author = {{{author}}}",
        *([f"booktitle = {{{venue}}}", year] if venue else arxiv),
    ]
    text = ",\n  ".join([f"@{'inproceedings' if venue else 'misc'}{{{key}", *fields])
    return Paper(family, short, title, url, f"{text}\n}}")


PAPERS = {
    "gcnn": _paper(
        "G-CNN",
        "Cohen and Welling, 2016",
        "Group Equivariant Convolutional Networks",
        "https://arxiv.org/abs/1602.07576",
        "cohen2016group",
        "Cohen, Taco S. and Welling, Max",
        "International Conference on Machine Learning",
    ),
    "attentive": _paper(
        "attentive",
        "Romero et al., 2020",
        "Attentive Group Equivariant Convolutional Networks",
        "https://arxiv.org/abs/2002.03830",
        "romero2020attentive",
        "Romero, David W. and Bekkers, Erik J. and Tomczak, Jakub M. and Hoogendoorn, Mark",
        "International Conference on Machine Learning",
    ),
    "asc": _paper(
        "ASC",
        "Diaconu and Worrall, 2019",
        "Affine Self Convolution",
        "https://arxiv.org/abs/1911.07704",
        "diaconu2019affine",
        "Diaconu, Nichita and Worrall, Daniel E.",
    ),
    "gsa": _paper(
        "GSA-Net",
        "Romero and Cordonnier, 2021",
        "Group Equivariant Stand-Alone Self-Attention for Vision",
        "https://arxiv.org/abs/2010.00977",
        "romero2021group",
        "Romero, David W. and Cordonnier, Jean-Baptiste",
        "International Conference on Learning Representations",
    ),
    "e4": _paper(
        "E4-Net",
        "He et al., 2021",
        "Efficient Equivariant Network",
        "https://proceedings.neurips.cc/paper/2021/file/2a79ea27c279e471f4d180b08d62b00a-Paper.pdf",
        "he2021efficient",
        "He, Lingshen and Chen, Yuxuan and Shen, Zhengyang and Dong, Yiming and Wang, Yisen and Lin, Zhouchen",
        "Advances in Neural Information Processing Systems",
    ),
    "convnext": _paper(
        "ConvNeXt",
        "Liu et al., 2022",
        "A ConvNet for the 2020s",
        "https://arxiv.org/abs/2201.03545",
        "liu2022convnet",
        "Liu, Zhuang and Mao, Hanzi and Wu, Chao-Yuan and Feichtenhofer, Christoph and\n"
        "            Darrell, Trevor and Xie, Saining",
        "IEEE/CVF Conference on Computer Vision and Pattern Recognition",
    ),
    "resnet": _paper(
        "ResNet",
        "He et al., 2016",
        "Deep Residual Learning for Image Recognition",
        "https://arxiv.org/abs/1512.03385",
        "he2016deep",
        "He, Kaiming and Zhang, Xiangyu and Ren, Shaoqing and Sun, Jian",
        "IEEE Conference on Computer Vision and Pattern Recognition",
    ),
    "octic": _paper(
        "octic ViT",
        "Nordström et al., 2025",
        "Octic Vision Transformers: Quicker ViTs Through Equivariance",
        "https://arxiv.org/abs/2505.15441",
        "nordstrom2025octic",
        'Nordstr{\\"o}m, David and Edstedt, Johan and Kahl, Fredrik and B{\\"o}kman, Georg',
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
    ): "the authors' code trains on all 50,000 images and keeps the epoch that is best on the test set",
    ("attentive", "pcam"): "the epoch chosen on validation data",
    ("gsa", "rotmnist"): f"{_ORIGINAL}; in the authors' code the test digits are the validation digits",
    ("gsa", "cifar10"): "in the authors' code the test set is the validation set",
    ("gsa", "pcam"): "the epoch chosen on validation data",
    ("e4", "rotmnist"): f"{_SELECTED} best test accuracy of the later epochs",
    ("e4", "cifar10"): "the authors' code reports the best test accuracy of all epochs",
    ("e4", "cifar100"): "the authors' code reports the best test accuracy of all epochs",
    ("asc", "cifar10"): "8 seeds, 45,000 training and 5,000 validation images",
    ("asc", "cifar100"): "8 seeds, 45,000 training and 5,000 validation images",
}

_FAMILIES = {
    "allcnn": "attentive",
    "asc_resnet": "asc",
    "e4_resnet": "e4",
    "e4net": "e4",
    "gcnn": "gcnn",
    "group_convnext": "convnext",
    "group_resnet": "resnet",
    "gsanet": "gsa",
    "octic_vit": "octic",
    "pcam_densenet": "attentive",
    "resnet44": "attentive",
}


def paper_of(model: str) -> Paper | None:
    """The paper that a registered network is from; None for the user's own.

    Example:
        >>> paper_of("p4_alpha_cnn").short, paper_of("p4_cnn").short
        ('Romero et al., 2020', 'Cohen and Welling, 2016')
    """
    package, _, family = timm.model_entrypoint(model).__module__.rpartition(".")
    if package != __package__ or family == "any_network":  # whose network inside has its own
        return None
    return PAPERS["attentive" if "_alpha" in model else _FAMILIES[family]]


@cache
def rows() -> dict[str, Row]:
    """The rows of all papers' tables, by checkpoint: ``<model>.<data set>``, with ``_aug`` where data is augmented."""
    found = {}
    with Path(__file__).with_name("papers.csv").open(encoding="utf-8", newline="") as file:
        for entry in csv.DictReader(file):
            dataset = entry["checkpoint"].partition(".")[2].removesuffix("_aug")
            note = _NOTES[entry["paper"], dataset]
            found[entry["checkpoint"]] = Row(entry["paper"], entry["error"], entry["spread"], entry["parameters"], note)
    return found
