"""`eqzoo finetune` with timm networks: plain, invariant by all copies, and by a canonical copy."""

import json
import shutil
from dataclasses import replace

import pytest
import timm
import torch
from sklearn.linear_model import LogisticRegression

import eqzoo
from eqzoo.cards import read_checkpoint, render_card
from eqzoo.cli.main import main
from eqzoo.data import Split
from eqzoo.finetuning.frozen import _PENALTIES, fit_classifier, pooled_features
from eqzoo.finetuning.plan import Request, make_plan
from eqzoo.hub import WeightsNotFoundError

WEIGHTS = "weights.pth"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Networks that were trained on small images from one file of weights, by the number of their copies."""
    folder = tmp_path_factory.mktemp("any_network")
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(60, (48, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.arange(48) % 3
    for image, label in zip(pixels, labels, strict=True):
        image[label, 4 : 10 + 6 * label, 8:20] += 150
    splits = {
        "train": Split(pixels[:24], labels[:24], ("red", "green", "blue")),
        "valid": Split(pixels[24:36], labels[24:36], ("red", "green", "blue")),
        "test": Split(pixels[36:], labels[36:], ("red", "green", "blue")),
    }
    torch.set_default_dtype(torch.float32)
    torch.save(timm.create_model("test_efficientnet").state_dict(), folder / WEIGHTS)
    found = {}
    for name, options in (("plain", {}), ("mean", {"invariant": "p4m"}), ("one", {"invariant": "p4m", "copies": 1})):
        given = {"size": 32, "epochs": 2, "precision": "float32", "channels_last": False}
        found[name] = eqzoo.finetune(
            "test_efficientnet", splits, folder / name, weights=folder / WEIGHTS, **options, **given
        )
    return found, splits


def test_the_invariant_ones_give_all_copies_one_class(trained):
    found, splits = trained
    for name in ("mean", "one"):
        assert found[name].results["same_class_at_all_quarter_rotations"] == 100
        assert eqzoo.check_equivariance(str(found[name].folder)).exact
        assert eqzoo.evaluate(str(found[name].folder), splits["test"])["same_class_at_all_quarter_rotations"] == 100
    assert eqzoo.equivariance_error(found["plain"].model, group="p4m") > 1e-3  # negative control


def test_the_folder_says_what_it_is(trained):
    found, _ = trained
    config = json.loads((found["one"].folder / "config.json").read_text())
    assert config["architecture"] == "orbitnet"
    known = {"network": "test_efficientnet", "group": "p4m", "copies": 1}
    assert config["model_args"] | known == config["model_args"]
    loaded = timm.create_model(f"local-dir:{found['one'].folder}", pretrained=True).float().eval()
    x = torch.rand(2, 3, 32, 32, dtype=torch.float32)
    assert torch.equal(loaded(x), found["one"].model.float()(x))
    assert (loaded.copies, loaded.group.name, loaded.pretrained_cfg["num_classes"]) == (1, "p4m", 3)
    command = found["one"].results["command"]
    assert f"--invariant p4m --copies 1 --weights {WEIGHTS}" in command
    recipe = json.loads((found["one"].folder / "training.json").read_text())["recipe"]
    assert recipe["model_args"]["network"] == "test_efficientnet"
    assert recipe["layer_decay"] == 0.75
    opening = {name: (run.folder / "README.md").read_text().partition("## Use")[0] for name, run in found.items()}
    assert all("`test_efficientnet` of timm" in text for text in opening.values())
    assert ["`orbitnet`" in opening[name] for name in ("plain", "mean", "one")] == [False, True, True]
    checkpoint = read_checkpoint(found["mean"].folder)
    config = checkpoint.config | {"model_args": config["model_args"] | {"network": "z2_cnn.rotmnist"}}
    assert "of timm" not in render_card(replace(checkpoint, config=config)).partition("## Use")[0]


def test_training_starts_from_the_file(trained):
    """The statistics of the first batch norm have moved, but not to those of another start."""
    found, _ = trained
    start = timm.create_model("test_efficientnet", checkpoint_path="")
    start.load_state_dict(torch.load(found["one"].folder.parent / WEIGHTS, weights_only=True))
    own = found["one"].model.network.state_dict()["conv_stem.weight"].float()
    other = timm.create_model("test_efficientnet").state_dict()["conv_stem.weight"]
    first = start.state_dict()["conv_stem.weight"].float()
    assert (own - first).norm() < 0.2 * (other - first).norm()


def test_commands_take_the_folder(trained, capsys):
    folder = str(trained[0]["one"].folder)
    for command in (["info", folder], ["check", folder, "--json"]):
        assert main(command) == 0
    assert "p4m" in capsys.readouterr().out


def test_a_folder_cannot_become_another_network(trained, tmp_path):
    with pytest.raises(ValueError, match=r"is a folder, which is what its config\.json says"):
        eqzoo.finetune(str(trained[0]["one"].folder), trained[1], tmp_path, invariant="p4")


def test_images_are_not_cropped_as_timm_does(trained):
    """By the transform that timm makes of these keys; those of this network's own configuration take an edge off."""
    cfg = timm.get_pretrained_cfg("test_efficientnet").to_dict()
    assert cfg["crop_pct"] < 1  # a negative control
    ours = json.loads((trained[0]["mean"].folder / "config.json").read_text())["pretrained_cfg"]
    assert (ours["crop_pct"], ours["interpolation"]) == (1, "bicubic")
    assert not any(key.startswith("test_") for key in ours)


def test_other_weights_are_another_run(trained, tmp_path):
    found, splits = trained
    other = tmp_path / "other.pth"
    torch.save(timm.create_model("test_efficientnet").state_dict(), other)
    folder = found["mean"].folder
    config, results = (json.loads((folder / name).read_text()) for name in ("config.json", "results.json"))
    assert (config["pretrained_cfg"].get("license"), results["start"], results["base_model"]) == (None, WEIGHTS, None)
    with pytest.raises(ValueError, match="weights_sha256 was"):
        eqzoo.finetune("test_efficientnet", splits, folder, weights=other, invariant="p4m", size=32, epochs=2)
    for network in ("test_efficientnet", "p4m_resnet_s"):
        with pytest.raises(FileNotFoundError, match=r"nosuch\.pth"):
            make_plan(Request(network, splits, tmp_path / "out", weights=tmp_path / "nosuch.pth"))


def test_a_finished_run_keeps_what_was_written_since(trained):
    found, splits = trained
    folder = found["plain"].folder
    card = folder / "README.md"
    card.write_text(card.read_text() + "\nOurs.\n")
    given = {"size": 32, "epochs": 2, "precision": "float32", "channels_last": False}
    again = eqzoo.finetune("test_efficientnet", splits, folder, weights=folder.parent / WEIGHTS, **given)
    assert card.read_text().endswith("Ours.\n")
    assert again.results == json.loads((folder / "results.json").read_text())
    (folder / "results.json").unlink()  # as after a kill
    eqzoo.finetune("test_efficientnet", splits, folder, weights=folder.parent / WEIGHTS, **given)
    assert not card.read_text().endswith("Ours.\n")


def test_a_network_without_weights_starts_from_random_ones(trained, tmp_path, capsys):
    plan = make_plan(Request("lcnet_035", trained[1], tmp_path / "out", size=32))
    assert (plan.settings["start"], plan.settings["base_model"]) == (None, None)
    assert "lcnet_035" in capsys.readouterr().err
    with pytest.raises(WeightsNotFoundError, match="lcnet_035"):
        make_plan(Request("lcnet_035", trained[1], tmp_path / "out", size=32, pretrained=True))
    assert main(["check", "lcnet_035", "--pretrained"]) == 2


def test_weights_of_a_folder_that_are_damaged_are_an_error_of_the_input(trained, tmp_path):
    folder = shutil.copytree(trained[0]["one"].folder, tmp_path / "copy")
    for weights in (b"", (trained[0]["one"].folder / "model.safetensors").read_bytes()[:-1]):
        (folder / "model.safetensors").write_bytes(weights)
        with pytest.raises(ValueError, match="copy"):
            eqzoo.create_model(str(folder), pretrained=True)


def test_a_folder_for_other_images_has_their_configuration(trained):
    model = eqzoo.create_model(str(trained[0]["one"].folder), pretrained=True, in_chans=1, num_classes=5)
    cfg = model.pretrained_cfg
    assert (model.in_chans, cfg["input_size"][0], len(cfg["mean"]), cfg["label_names"]) == (1, 1, 1, None)


def test_a_classifier_on_frozen_features_has_converged(trained, tmp_path):
    found, splits = trained
    source = found["mean"].folder
    result = eqzoo.finetune(str(source), splits, tmp_path / "frozen", freeze=True)
    before, after = found["mean"].model.state_dict(), result.model.state_dict()
    changed = {key for key in after if not torch.equal(before[key].float(), after[key].float())}
    assert changed == {"network.classifier.weight", "network.classifier.bias"}
    row = json.loads((tmp_path / "frozen" / "log.jsonl").read_text())
    assert row["valid_accuracy"] >= 60  # of three classes
    settings = (tmp_path / "frozen" / "README.md").read_text()
    assert f"| penalty | {row['penalty']:g} |" in settings
    assert "epoch 1" not in settings  # none was chosen
    assert "| optimizer |" not in settings
    features = pooled_features(result.model, splits["train"])
    z = (features - features.mean(0)) / features.std(0)
    ours = fit_classifier(z, splits["train"].labels, 3, row["penalty"])
    theirs = LogisticRegression(C=1 / (row["penalty"] * len(z)), tol=1e-10, max_iter=10_000)
    theirs.fit(z.numpy(), splits["train"].labels.numpy())
    torch.testing.assert_close(ours[:, :-1], torch.from_numpy(theirs.coef_), rtol=1e-2, atol=1e-3)
    # The network's classifier is this one on features that are not standardized.
    classifier = result.model.get_classifier().double()
    logits = z @ ours[:, :-1].T + ours[:, -1]
    assert (classifier(features) - logits).norm() < 0.1 * logits.norm()  # that fit began at the last penalty's
    # At most one other penalty does better on the validation images, in fits from zero.
    valid = (pooled_features(result.model, splits["valid"]) - features.mean(0)) / features.std(0)
    scores = {}
    for penalty in _PENALTIES:
        fitted = fit_classifier(z, splits["train"].labels, 3, penalty)
        logits, labels = valid @ fitted[:, :-1].T + fitted[:, -1], splits["valid"].labels
        hits = (logits.argmax(1) == labels).double().mean().item()
        scores[penalty] = hits, -torch.nn.functional.cross_entropy(logits, labels).item()
    assert row["penalty"] in sorted(scores, key=scores.__getitem__)[-2:]
    assert len(set(scores.values())) == len(_PENALTIES) > 4
    log = tmp_path / "frozen" / "log.jsonl"
    log.write_text(log.read_text()[:57])  # as of a process that was killed while it wrote
    again = eqzoo.finetune(str(source), splits, tmp_path / "frozen", freeze=True)
    assert again.results["accuracy"] == result.results["accuracy"]
    assert json.loads(log.read_text())["penalty"] == row["penalty"]
