"""Recipes of plain and attentive group CNNs on rotated MNIST (Romero et al., 2020), ours and the paper's."""

from typing import Any

from eqzoo.engine import Recipe

from ._entry import Entry, family

FULL = ("p4_alpha_cnn", "p4_alpha_ch_cnn", "p4_alpha_sp_cnn", "p4_alpha_rh_cnn")
ATTENTIVE = (*FULL, "p4_alpha_f_cnn")
WIDER = ("p4_cnn_w11", "p4_cnn_w15", "p4_cnn_w19")

_OURS = """Adam, batch size, weight decay and dropout as in the paper; a cosine learning rate schedule from 5e-3
over 150 epochs (the paper: a constant rate)."""
_SHORTER = """Adam, batch size, weight decay and dropout as in the paper; a cosine learning rate schedule from 5e-3
over 50 epochs, about an hour on one CPU core, and augmentation by bilinear rotations by any angle (the paper:
none)."""
_RH = """Adam, batch size and weight decay as in the paper; dropout 0.1 (the paper: 0.3), a moving average of the
weights, a cosine learning rate schedule from 5e-3 over 50 epochs, half an hour on one CPU core, and augmentation by
bilinear rotations by any angle (the paper: none)."""
_PLAIN = """Adam, batch size, weight decay and dropout as in the paper; a cosine learning rate schedule from 5e-3
over 60 epochs in {precision}, {minutes} minutes on one CPU core, and augmentation by bilinear rotations by any angle
(the paper: none)."""
_REFLECTIONS = """Adam, batch size and weight decay as in the paper; dropout 0.1 (the paper: 0.3), a moving average of
the weights, a cosine learning rate schedule from 5e-3 over 80 epochs in bfloat16, half an hour on one CPU core, and
augmentation by bilinear rotations by any angle (the paper: none). The network is invariant under reflections and thus
cannot tell a digit from its reflection. No paper reports the error of this network."""
_PAPER = """As in the paper: Adam with constant learning rate 1e-3, batch size 128, weight decay 1e-4 on all parameters,
dropout 0.3 and {epochs} epochs; 10,000 training and 2,000 validation digits. The authors' code trains on all 12,000
and selects the epoch with the best test error."""
_ROTATED: dict[str, Any] = {"lr": 5e-3, "augment": "rotations"}
_PLAIN_VALUES: dict[str, Any] = {"epochs": 60, "precision": "bfloat16", **_ROTATED}


def _text(text: str) -> str:
    return " ".join(text.split())


def _in_float32(model: str, minutes: int) -> dict[str, Entry]:
    text = _text(_PLAIN.format(precision="float32", minutes=minutes))
    return family((model,), "rotmnist", text, epochs=60, **_ROTATED)


RECIPES: dict[str, Entry] = {
    **_in_float32("p4_cnn", 37),
    "z2_cnn.rotmnist": Entry(
        Recipe(model="z2_cnn", dataset="rotmnist", epochs=300),
        _text("""Adam, batch size, weight decay and dropout as in the attentive paper, 300 epochs as in its code; a
        cosine learning rate schedule in place of a constant rate."""),
    ),
    **family(("p4_alpha_f_cnn",), "rotmnist", _text(_OURS), epochs=150, lr=5e-3),
    **family(("p4_cnn_w19",), "rotmnist", _text(_PLAIN.format(minutes=32, **_PLAIN_VALUES)), **_PLAIN_VALUES),
    **_in_float32("p4_cnn_w15", minutes=33),
    **_in_float32("p4_cnn_w11", minutes=21),
    **family(
        ("p4m_cnn",),
        "rotmnist",
        _text(_REFLECTIONS),
        **_PLAIN_VALUES | {"epochs": 80, "ema_decay": 0.999, "model_args": {"drop_rate": 0.1}},
    ),
    **family(FULL[:3], "rotmnist", _text(_SHORTER), epochs=50, **_ROTATED),
    **family(FULL[3:], "rotmnist", _text(_RH), epochs=50, ema_decay=0.999, model_args={"drop_rate": 0.1}, **_ROTATED),
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
            _PAPER.format(epochs=300)
            + " The paper cites the error of this network; the 300 epochs are from the authors' code."
        ),
        "paper",
        epochs=300,
        schedule="constant",
    ),
}
