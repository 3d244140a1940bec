"""Attentive and plain p4 networks on rotated MNIST: our recipes, and the attentive paper's as it stands."""

from typing import Any

from eqzoo.engine import Recipe

from ._entry import Entry, family

__all__ = ["RECIPES"]

FULL = ("p4_alpha_cnn", "p4_alpha_ch_cnn", "p4_alpha_sp_cnn", "p4_alpha_rh_cnn")
ATTENTIVE = (*FULL, "p4_alpha_f_cnn")
WIDER = ("p4_cnn_w11", "p4_cnn_w15", "p4_cnn_w19")

_OURS = """The paper's Adam, batch, weight decay and dropout; the learning rate and the length are those of p4_cnn
here."""
_SHORTER = """The paper's Adam, batch, weight decay and dropout; the learning rate and the length are ours: along a
cosine from 5e-3 in 50 epochs, about an hour on one core of a CPU. Digits are turned again, by any angle, bilinearly,
where the paper's are left alone."""
_RH = """The paper's Adam, batch and weight decay; the rest is ours: dropout 0.1 against the paper's 0.3, a moving
average of the weights, and the learning rate along a cosine from 5e-3 in 50 epochs, half an hour on one core of a CPU.
Digits are turned again, by any angle, bilinearly, where the paper's are left alone. Two recipes before this one, with
dropout 0.3 and no average, had higher validation errors: 1.50 % in 36 epochs, with 2.12 % test error, and 1.65 % in 50,
which was not tested."""
_PLAIN = """The paper's Adam, batch, weight decay and dropout; the learning rate and the length are ours: along a cosine
from 5e-3 in 60 epochs, in bfloat16, half an hour on one core of a CPU. Digits are turned again, by any angle,
bilinearly, where the paper's are left alone."""
_MIRRORS = """ A digit and its mirror image are one to this network, whose error no paper names: of its 61 validation
errors 10 are between 2 and 5, more than between any other two. That is the smaller part of its distance from
p4_cnn_w19, which has three times its parameters. Its training loss ended at 0.12, that of p4_cnn_w19 with the same
recipe at 0.03; but a run without dropout, with Muon, which brought it below 0.01, had no validation error under 3.15 %
in the 89 epochs of 120 after which it was stopped."""
_PAPER = """The paper's recipe: Adam with 1e-3 throughout, batch 128, weight decay 1e-4 on all parameters, dropout 0.3,
{epochs} epochs. The paper names 10,000 training and 2,000 validation digits, as here; its code trains on all 12,000 and
keeps the epoch that is best on the test digits, which is not done here."""
_TURNED: dict[str, Any] = {"lr": 5e-3, "augment": "turns"}
_PLAIN_VALUES: dict[str, Any] = {"epochs": 60, "precision": "bfloat16", **_TURNED}


def _text(text: str) -> str:
    return " ".join(text.split())


RECIPES: dict[str, Entry] = {
    "p4_cnn.rotmnist": Entry(
        Recipe(model="p4_cnn", dataset="rotmnist", epochs=150, lr=5e-3),
        _text("""The paper's Adam, batch, weight decay and dropout; the learning rate and the length are ours. The
        learning rate falls along a cosine from 5e-3 in 150 epochs. A first recipe, the paper's 1e-3 in 100 epochs, had
        2.10 % validation and 2.41 % test error; this one was tried after that, and has the lower validation error."""),
    ),
    "z2_cnn.rotmnist": Entry(
        Recipe(model="z2_cnn", dataset="rotmnist", epochs=300),
        _text("""The attentive paper's Adam, batch, weight decay and dropout, and its code's 300 epochs; the cosine is
        ours."""),
    ),
    **family(("p4_alpha_f_cnn",), "rotmnist", _text(_OURS), epochs=150, lr=5e-3),
    **family(WIDER, "rotmnist", _text(_PLAIN), **_PLAIN_VALUES),
    **family(("p4m_cnn",), "rotmnist", _text(_PLAIN + _MIRRORS), **_PLAIN_VALUES),
    **family(FULL[:3], "rotmnist", _text(_SHORTER), epochs=50, **_TURNED),
    **family(FULL[3:], "rotmnist", _text(_RH), epochs=50, ema_decay=0.999, model_args={"drop_rate": 0.1}, **_TURNED),
    **family(
        ("p4_cnn", *WIDER, *ATTENTIVE),
        "rotmnist",
        _text(_PAPER.format(epochs=100)),
        "paper",
        epochs=100,
        schedule="constant",
    ),
    **family(
        ("z2_cnn",),
        "rotmnist",
        _text(
            _PAPER.format(epochs=300) + " The paper quotes the error of this network; the 300 epochs are its code's."
        ),
        "paper",
        epochs=300,
        schedule="constant",
    ),
}
