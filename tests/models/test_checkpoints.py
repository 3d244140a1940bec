"""Published checkpoints: their accuracy, their predictions on rotated images, their export."""

import functools
import json

import pytest
import timm
import torch

import eqzoo
from eqzoo.cards import REPO_FILES
from eqzoo.data import Split, load_splits, normalize, resized, rotmnist
from eqzoo.hub import shipped_folder
from tests.conftest import slow
from tests.digits import rotating

NAMES = eqzoo.list_pretrained()


@pytest.fixture(scope="module")
def some_of(request, made_once):
    """200 test images of a data set, drawn from all over the split."""

    def rotated_digits():
        with rotating(range(12_000, 62_000, 250)):  # behind the images to train on
            return rotmnist(request.getfixturevalue("mnist_dir"))["test"]

    @functools.cache
    def load(dataset):
        if dataset == "cifar10":
            return drawn(request.getfixturevalue("cifar10_test"))
        folder = request.getfixturevalue("mnist_dir" if dataset == "rotmnist" else "real_images_dir")
        if dataset != "rotmnist" and not (folder / dataset).is_dir():
            pytest.skip(f"no {dataset} beside the checkout")

        def draw(path):
            test = rotated_digits() if dataset == "rotmnist" else load_splits(dataset, folder)["test"]
            torch.save(vars(drawn(test)), path)

        return Split(**torch.load(made_once(f"some_of_{dataset}", draw), weights_only=True))

    return load


def drawn(test):
    return test[torch.arange(200) * len(test) // 200]


@pytest.mark.parametrize("name", eqzoo.list_pretrained())
def test_every_published_checkpoint_is_here_and_its_config_is_the_registered_one(name):
    folder = shipped_folder() / name
    config = json.loads((folder / "config.json").read_text())
    registered = timm.get_pretrained_cfg(name).to_dict()
    for key, value in config["pretrained_cfg"].items():
        assert json.loads(json.dumps(registered[key])) == value, key
    assert config["architecture"] == registered["architecture"]
    files = {"README.md", "config.json", "model.safetensors", "results.json", "training.json"}
    assert files <= {path.name for path in folder.iterdir()} <= {*REPO_FILES}


SMALLER = {"resnet": 16, "allcnn": 16, "gsanet_t": 22}
ATTENTION = {name for name in NAMES if "gsanet" in name and name.startswith(("r8", "r12", "r16", "r4m"))}


@pytest.mark.parametrize("name", slow(NAMES, ATTENTION))
def test_a_published_checkpoint_keeps_its_promise(name):
    model = eqzoo.create_model(name, pretrained=True)
    # Smaller images, where the network takes them; its card has the error at its own size.
    side = next((side for kind, side in SMALLER.items() if kind in name), None)
    x = torch.randn(1, model.in_chans, side, side) if side else None
    if name.startswith("z2"):
        assert eqzoo.equivariance_error(model, x, group=eqzoo.P4) > 1e-2
    else:
        assert eqzoo.equivariance_error(model, x) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_a_published_checkpoint_scores_as_its_card_says_and_keeps_its_classes(name, some_of):
    results = json.loads((shipped_folder() / name / "results.json").read_text())
    model = eqzoo.create_model(name, pretrained=True).float().eval()
    test = resized(some_of(results["data"]), model.pretrained_cfg["input_size"][1:])
    sizes = ((200, 1e8), (80, 2.4e8), (40, 1e9), (20, 1e99))
    count = next(n for n, most in sizes if eqzoo.multiply_adds(model) < most)
    some = test[torch.arange(count) * len(test) // count]
    images = normalize(some.images, model.pretrained_cfg["mean"], model.pretrained_cfg["std"], torch.float32)
    few = images[:12]  # of which all rotations are predicted
    with torch.inference_mode():
        upright = torch.cat([model(x) for x in images.split(125)])
        rotated = torch.stack([upright[: len(few)], *(model(few.rot90(r, (2, 3))) for r in (1, 2, 3))])
    classes = rotated.argmax(2)
    rate = 1 - results["accuracy"] / 100
    wrong = (upright.argmax(1) != some.labels).double().mean().item()
    assert abs(wrong - rate) <= 4 * (rate * (1 - rate) / count) ** 0.5  # four standard deviations of such a sample
    if model.group.order == 1:
        assert (rotated - rotated[0]).abs().max() > 0.1  # few of the classes may change
        return
    kept = (classes == classes[0]).all(0)
    # In float32 a class may change where two are as likely to the last digits.
    first, second = rotated[0].topk(2).values.unbind(1)
    assert kept[first - second > 1e-3].all()


# An export takes ten seconds, of attention up to a minute, so that a few checkpoints stand for the others, and none for
# affine self convolution and GSA-Nets; tests/export writes ONNX files of attention layers and of small networks.
EXPORTED = {"p4_cnn.rotmnist", "p4m_resnet29.eurosat"}
assert set(NAMES) >= EXPORTED


@pytest.mark.parametrize("name", slow(NAMES, set(NAMES) - EXPORTED))
def test_a_published_checkpoint_can_be_exported(name, tmp_path):
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    report = eqzoo.export_onnx(eqzoo.create_model(name, pretrained=True).float(), tmp_path / "net.onnx")
    config = json.loads((shipped_folder() / name / "config.json").read_text())
    assert report.metadata["weights_sha256"] == config["eqzoo"]["weights_sha256"]
    assert max(report.equivariance.values()) < 1e-5
