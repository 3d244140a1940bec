"""Converted weights against the released networks' own equations, from released files and from made-up ones."""

import pytest
import torch

import eqzoo
from eqzoo.cli import main as command_line
from eqzoo.groups import P4M
from eqzoo.models.conversion import att_gconvs, convert, foreign_elements
from tests.conftest import ROOT, SHARED
from tests.layers.reference_attentive import ReleasedCNN, ReleasedDenseNet

# The first logits of the released networks on `wave`, computed with their own code, to six places.
LOGITS = {
    "z2_cnn": (-23.484869, -9.084382, 3.172191, -0.631910),
    "p4_cnn": (-4.012313, -3.400567, -2.049972, 9.927586),
    "p4_alpha_cnn": (1.151095, -10.038883, -2.266513, 0.339604),
    "p4_alpha_f_cnn": (-11.279734, -1.921300, -1.164982, 6.675904),
    "p4m_densenet": (-2.111360, 2.031789),
}
# What they score on the original test digits, in percent, by their authors' logs.
ACCURACY = {"z2_cnn": 95.19, "p4_cnn": 97.86, "p4_alpha_cnn": 98.36, "p4_alpha_f_cnn": 98.34}
ORDER = {"z2_cnn": 1, "p4m_densenet": 8}
FILES = SHARED / "peer_weights" / "att_gconvs"


def released_shapes(name):
    """The names and shapes of a released file."""
    norm = {"weight": 1, "bias": 1, "running_mean": 1, "running_var": 1, "num_batches_tracked": 0}
    shapes = {}

    def add_norm(key, channels):
        shapes.update({f"{key}.{part}": (channels,) * ndim for part, ndim in norm.items()})

    if name == "p4m_densenet":
        shapes["module.c1.weight"] = (9, 3, 3, 3)
        for i in range(5):
            shapes[f"module.block_layers.{i}.conv.weight"] = (9, 9 * (i + 1), 8, 3, 3)
            add_norm(f"module.block_layers.{i}.bn", 9 * (i + 1))
        for i in range(4):
            shapes[f"module.trans_layers.{i}.conv.weight"] = (9 * (i + 2), 9 * (i + 2), 8, 1, 1)
            add_norm(f"module.trans_layers.{i}.bn", 9 * (i + 2))
        add_norm("module.bn_out", 54)
        return shapes | {"module.c_out.weight": (2, 54, 8, 1, 1)}
    n, poses = (20, ()) if name == "z2_cnn" else (10, (4,))
    for i in range(1, 8):
        lift, last = i == 1, i == 7
        slots = () if lift else poses
        shapes[f"c{i}.weight"] = (10 if last else n, 1 if lift else n, *slots, *((4, 4) if last else (3, 3)))
        inner = (1, 1) if lift else (5, 10)
        if name == "p4_alpha_cnn":
            shapes[f"c{i}.channel_attention.weight_fc1"] = (10, *inner, *slots)
            shapes[f"c{i}.channel_attention.weight_fc2"] = (10, *inner[::-1], *slots)
            shapes[f"c{i}.spatial_attention.weight"] = (10, 2, *slots, 7, 7)
        if name == "p4_alpha_f_cnn":
            shapes[f"c{i}.channel_attention.weight_fc1"] = (*inner, *slots)
            shapes[f"c{i}.channel_attention.weight_fc2"] = (*inner[::-1], *slots)
            shapes[f"c{i}.spatial_attention.weight"] = (1, 2, *slots, 7, 7)
        if not last:
            add_norm(f"bn{i}", n)
    return shapes


def made_up(name, path):
    """A file with the names and shapes of a released one, and weights that keep every activation alive."""
    state = {}
    for key, shape in released_shapes(name).items():
        if key.endswith("num_batches_tracked"):
            state[key] = torch.tensor(3)
        elif key.endswith("running_mean"):
            state[key] = 0.1 * torch.randn(shape).float()
        elif len(shape) == 1:
            state[key] = torch.rand(shape).float() + 0.5
        else:
            state[key] = (torch.randn(shape) * (2 / torch.Size(shape[1:]).numel()) ** 0.5).float()
    torch.save(state, path)
    return path


def released(name, path):
    state = torch.load(path, weights_only=True, map_location="cpu")
    return (ReleasedDenseNet if name == "p4m_densenet" else ReleasedCNN)(state, ORDER.get(name, 4))


def wave(channels, side):
    row, column = torch.arange(side)[:, None].double(), torch.arange(side)[None].double()
    wavy = [torch.sin(0.31 * row + 0.5 * c) + torch.cos(0.23 * column - 0.01 * row * column) for c in range(channels)]
    return torch.stack(wavy)[None]


def converted(name, path, folder, untransposed=False):
    output = folder / "converted.safetensors"
    convert("att_gconvs", path, name, output, untransposed=untransposed)
    name += ".pcam" if name == "p4m_densenet" else ""
    return eqzoo.create_model(name, checkpoint_path=output).eval()


def images(model):
    channels, side, _ = model.input_size
    return torch.cat([wave(channels, side), torch.randn(1, channels, side, side)])


def difference(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("name", LOGITS)
@torch.no_grad()
def test_converted_networks_compute_the_released_function(name, tmp_path):
    path = made_up(name, tmp_path / "released.pth")
    model, theirs = converted(name, path, tmp_path), released(name, path)
    x = images(model)
    assert difference(model(x), theirs(x)) < 1e-12
    untransposed = converted(name, path, tmp_path, untransposed=True)
    assert difference(untransposed(x), theirs(x.mT)) < 1e-12
    if name != "p4m_densenet":  # which a transposition does not change
        assert difference(untransposed(x), theirs(x)) > 1e-3


@pytest.mark.skipif(not FILES.exists(), reason="no released files here")
@pytest.mark.parametrize("name", LOGITS)
@torch.no_grad()
def test_released_files_give_the_released_logits(name, tmp_path):
    path = FILES / f"{name}.pth"
    model, theirs = converted(name, path, tmp_path), released(name, path)
    x = images(model)
    logits = model(x)
    torch.testing.assert_close(logits[0, : len(LOGITS[name])], torch.tensor(LOGITS[name]), rtol=0, atol=1e-6)
    assert difference(logits, theirs(x)) < 1e-12
    assert difference(converted(name, path, tmp_path, untransposed=True)(x), theirs(x.mT)) < 1e-12
    if name != "z2_cnn":
        assert eqzoo.equivariance_error(model) < 1e-12


@pytest.mark.slow
@pytest.mark.skipif(not FILES.exists(), reason="no released files here")
def test_untransposed_networks_classify_digits_as_they_are(tmp_path):
    """On digits made again, and fewer of them, the accuracy is that of the logs to a percent."""
    from eqzoo.data import normalize, rotmnist

    try:
        splits = rotmnist(ROOT / "data")
    except FileNotFoundError:
        pytest.skip("no MNIST in data/")
    torch.set_default_dtype(torch.float32)
    for name, accuracy in ACCURACY.items():
        model = converted(name, FILES / f"{name}.pth", tmp_path, untransposed=True)
        cfg, test = model.pretrained_cfg, splits["test"][::25]
        x = normalize(test.images, cfg["mean"], cfg["std"], torch.float32)
        with torch.no_grad():
            right = torch.cat([model(batch).argmax(1) for batch in x.split(100)]) == test.labels
        assert 100 * right.double().mean().item() == pytest.approx(accuracy, abs=1)


def test_elements_are_matched_by_their_matrices():
    """Rotate first, then flip the rows; checked on an image rather than on matrices."""
    from eqzoo.groups import transform

    image = torch.randn(3, 3)
    for a, ours in enumerate(foreign_elements(P4M)):
        rotated = torch.rot90(image, a % 4, (-2, -1))
        assert torch.equal(transform(image, P4M, ours, "trivial"), rotated.flip(-2) if a > 3 else rotated)
    for a, ours in enumerate(foreign_elements(P4M, untransposed=True)):
        rotated = torch.rot90(image.mT, a % 4, (-2, -1))
        assert torch.equal(transform(image, P4M, ours, "trivial"), (rotated.flip(-2) if a > 3 else rotated).mT)


def test_conversion_can_go_wrong(tmp_path, monkeypatch):
    """Negative control: with the elements in their own order, p4m networks compute something else."""
    path = made_up("p4m_densenet", tmp_path / "released.pth")
    theirs = released("p4m_densenet", path)
    monkeypatch.setattr("eqzoo.models.conversion.foreign_elements", lambda group, untransposed: list(group.elements))
    model = converted("p4m_densenet", path, tmp_path)
    x = images(model)
    with torch.no_grad():
        assert difference(model(x), theirs(x)) > 1e-3


def test_the_command_writes_what_create_model_reads(tmp_path, capsys):
    path, output = made_up("p4_cnn", tmp_path / "released.pth"), tmp_path / "p4_cnn.safetensors"
    command = ["convert", "att_gconvs", str(path), "--model", "p4_cnn", "--output", str(output), "--untransposed"]
    assert command_line.main(command) == 0
    assert str(output) in capsys.readouterr().out
    model = eqzoo.create_model("p4_cnn", checkpoint_path=output).eval()
    x = images(model)
    assert difference(model(x), released("p4_cnn", path)(x.mT)) < 1e-12
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["p4_cnn.safetensors", "released.pth"]
    assert command_line.main([*command[:4], "p4_alpha_cnn", *command[5:]]) == 2
    assert "c1.channel_attention.weight_fc1" in capsys.readouterr().err


def test_errors_name_what_does_not_fit(tmp_path):
    path = made_up("p4_alpha_cnn", tmp_path / "released.pth")
    for model in ("p4_cnn", "p4_alpha_f_cnn"):  # which have none, and others
        with pytest.raises(ValueError, match=r"c1\.channel_attention\.weight_fc1, "):
            att_gconvs(path, model)
    with pytest.raises(ValueError, match="settings is of another source than att_gconvs"):
        convert("att_gconvs", tmp_path / "a.pth", "p4_cnn", tmp_path / "b.safetensors", settings={"num_heads": 3})
    with pytest.raises(ValueError, match="fit z2_cnn, p4_cnn, p4_alpha_cnn, p4_alpha_f_cnn, p4m_densenet; got 'p4m"):
        att_gconvs(path, "p4m_cnn")
    state = torch.load(path, weights_only=True)
    del state["bn3.running_var"]
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"shape are bn3\.running_var$"):
        att_gconvs(path, "p4_alpha_cnn")
    torch.save({f"layer.{i}": torch.zeros(1) for i in range(9)}, path)
    with pytest.raises(ValueError, match=r"shape are bn1\.bias, .* more$"):
        att_gconvs(path, "p4_cnn")
    for content, reason in ((b"", "EOFError"), (b"PK\x03\x04", "RuntimeError: "), (b"j\0\0\0\1", "KeyError: 16777216")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"not a state dict that torch can read \({reason}"):
            att_gconvs(path, "p4_cnn")
    torch.save([torch.zeros(1)], path)
    with pytest.raises(ValueError, match="holds a list"):
        att_gconvs(path, "p4_cnn")
    with pytest.raises(FileNotFoundError):
        att_gconvs(tmp_path / "none.pth", "p4_cnn")


def test_a_file_that_runs_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (eval, ("1 + 1",))

    torch.save({"c1.weight": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match="not a state dict that torch can read"):
        att_gconvs(tmp_path / "evil.pth", "p4_cnn")
