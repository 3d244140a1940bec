"""The whole road to the Hub and back, against a loopback Hub: publish, load, and every way in which that can fail."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT
from tests.hub_server import TOKEN, Client, LoopbackHub

NAME = "p4_cnn.rotmnist"
REPO = f"eqzoo/{NAME}"
SHIPPED = ROOT / "model_cards" / NAME
FILES = {path.name for path in SHIPPED.iterdir()}


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    """A Hub, and a client whose package ships cards without weights, as the wheel does for large ones."""
    tmp = tmp_path_factory.mktemp("road")
    hub = LoopbackHub()
    client = Client(hub.environment(tmp / "home"), ROOT)
    shipped = tmp / "shipped"
    for name in ("config.json", "results.json"):
        (shipped / NAME).mkdir(parents=True, exist_ok=True)
        shutil.copy(SHIPPED / name, shipped / NAME)
    client.run(f"""
import os, pathlib, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "training")!r}]
import eqzoo, eqzoo.hub, publish, safetensors.torch, timm, torch
eqzoo.hub.shipped_folder = lambda: pathlib.Path({str(shipped)!r})
def peak(model):
    print(model.head.weight.double().abs().sum().item(), model.num_classes)
""")
    yield hub, client
    client.close()
    hub.shutdown()


@pytest.fixture
def hub(road):
    """A Hub without repos."""
    road[0].repos.clear()
    road[0].large.clear()
    road[0].requests.clear()
    road[0].failing.clear()
    return road[0]


@pytest.fixture
def client(road, tmp_path):
    """A client that is logged in, publishes into a tree of its own, and has an empty cache."""
    (tmp_path / "tree" / "docs").mkdir(parents=True)
    for name in ("README.md", "docs/results.md"):
        (tmp_path / "tree" / name).write_text(
            "<!-- checkpoints: rendered by training/tables.py -->\n\n<!-- end of checkpoints -->"
        )
    road[1].run(f"""
os.environ["HF_TOKEN"] = {TOKEN!r}
publish.ROOT = pathlib.Path({str(tmp_path / "tree")!r})
publish.CARDS = publish.ROOT / "model_cards"
cache = {str(tmp_path / "cache")!r}
""")
    return road[1]


@pytest.fixture
def run(tmp_path):
    """The folder of an evaluated run."""
    return make_run(tmp_path / "run")


def make_run(folder, scale=1.0):
    shutil.copytree(SHIPPED, folder)
    state = {key: value * scale if value.is_floating_point() else value for key, value in load_file(WEIGHTS).items()}
    save_file(state, folder / "model.safetensors")
    state_of_weights(folder)
    return folder


def state_of_weights(folder, **changes):
    """Says in results.json and config.json of which weights they are, and what else changes in the results."""
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    results, config = (json.loads((folder / name).read_text()) for name in ("results.json", "config.json"))
    config["eqzoo"]["weights_sha256"] = digest
    (folder / "results.json").write_text(json.dumps(results | {"weights_sha256": digest} | changes, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


WEIGHTS = SHIPPED / "model.safetensors"


def upload(hub, **changes):
    """Puts the shipped checkpoint on the Hub by hand."""
    files = {path.name: path.read_bytes() for path in SHIPPED.iterdir()} | changes
    hub.commit(REPO, files)


def files(hub, repo):
    """What was published into a repo: its files without the one that every new repo has."""
    return {name: data for name, data in hub.files(repo).items() if name != ".gitattributes"}


def head_of(path):
    return str(load_file(path)["head.weight"].double().abs().sum().item())


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_published_is_loaded_back_through_every_door(hub, client, run, tmp_path):
    said = client.run(f"publish.main([{str(run)!r}, '--push', 'eqzoo'])")
    folder = tmp_path / "tree" / "model_cards" / NAME
    assert f"{NAME}: uploaded {', '.join(sorted(FILES))}" in said
    assert files(hub, REPO) == snapshot(folder)
    assert set(files(hub, REPO)) == FILES
    assert [message for _, message, _ in hub.repos[REPO]] == ["initial commit", f"Publish {NAME}"]
    expected = f"{head_of(run / 'model.safetensors')} 10\n"
    for code in (
        f"eqzoo.create_model({NAME!r}, pretrained=True, cache_dir=cache + '1')",
        f"eqzoo.create_model('hf-hub:{REPO}', pretrained=True, cache_dir=cache + '2')",
        f"timm.create_model('hf-hub:{REPO}', pretrained=True, cache_dir=cache + '3')",
        f"timm.create_model({NAME!r}, pretrained=True, cache_dir=cache + '4')",
        f"timm.create_model('local-dir:{folder}', pretrained=True)",
        f"torch.hub.load({str(ROOT)!r}, 'create_model', {NAME!r}, source='local', pretrained=True, cache_dir=cache)",
    ):
        assert client.run(f"peak({code})") == expected, code


def test_publishing_again_changes_only_what_changed(hub, client, run):
    command = f"publish.main([{str(run)!r}, '--push', 'eqzoo'])"
    client.run(command)
    assert "uploaded nothing" in client.run(command)
    assert len(hub.repos[REPO]) == 2
    results = json.loads((run / "results.json").read_text()) | {"machine": "another"}
    (run / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    hub.requests.clear()
    assert f"{NAME}: uploaded README.md, results.json" in client.run(command)
    assert len(hub.repos[REPO]) == 3
    assert not [path for method, path in hub.requests if method == "PUT"]  # the weights did not travel again


def test_offline_from_a_warm_cache(hub, client, tmp_path):
    upload(hub)
    code = f"peak(eqzoo.create_model({{!r}}, pretrained=True, cache_dir={str(tmp_path / 'cache')!r}))"
    first = client.run(code.format(NAME)) + client.run(code.format(f"hf-hub:{REPO}"))
    gets = [path for method, path in hub.requests if method == "GET"]
    assert sum(path.endswith("model.safetensors") for path in gets) == 1  # the second time a HEAD is enough
    hub.failing.add("error")
    assert client.run(code.format(NAME)) == first.splitlines(keepends=True)[0]
    hub.requests.clear()
    script = "import pathlib, eqzoo, eqzoo.hub; eqzoo.hub.shipped_folder = lambda: pathlib.Path('none')\n"
    script += "peak = lambda model: print(model.head.weight.double().abs().sum().item(), model.num_classes)\n"
    offline = Client(hub.environment(tmp_path / "home", HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT)), tmp_path)
    assert offline.run(script + code.format(NAME) + "\n" + code.format(f"hf-hub:{REPO}")) == first
    cold = f"eqzoo.create_model({NAME!r}, pretrained=True, cache_dir={str(tmp_path / 'cold')!r})"
    _, error = offline(cold)
    offline.close()
    assert error.startswith("WeightsNotFoundError")
    assert not hub.requests


FAILURES = ("missing", "unauthorized", "error", "damaged")


@pytest.mark.parametrize("failure", FAILURES)
def test_a_download_that_fails_says_so_and_leaves_nothing(hub, client, tmp_path, failure):
    if failure != "missing":
        upload(hub)
        hub.failing.add(failure)
    for name in (NAME, f"hf-hub:{REPO}"):
        _, error = client(f"eqzoo.create_model({name!r}, pretrained=True, cache_dir=cache)")
        assert REPO in error  # what was asked
        assert error.startswith("ValueError" if failure == "damaged" else "WeightsNotFoundError")
    hub.failing.clear()
    names = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not [name for name in names if name == "model.safetensors" or len(name) == 64]  # that of a large file
    if failure != "missing":
        client.run(f"eqzoo.create_model({NAME!r}, pretrained=True, cache_dir=cache)")


def test_a_repo_that_was_changed_since_is_noticed(hub, client, tmp_path):
    """The Hub's own hash fits the file; only what the package and the config.json know tells."""
    state = {key: torch.zeros_like(value) for key, value in load_file(WEIGHTS).items()}
    save_file(state, tmp_path / "zeros.safetensors")
    upload(hub, **{"model.safetensors": (tmp_path / "zeros.safetensors").read_bytes()})
    known = json.loads((SHIPPED / "results.json").read_text())["weights_sha256"]
    for name in (NAME, f"hf-hub:{REPO}"):
        for builder in ("eqzoo", "timm"):
            _, error = client(f"{builder}.create_model({name!r}, pretrained=True, cache_dir=cache)")
            assert error.startswith("ValueError")
            assert known in error
    upload(hub, **{"model.safetensors": (tmp_path / "zeros.safetensors").read_bytes(), "config.json": bare_config()})
    # A repo that states no hash is held against the Hub's alone.
    assert client.run(f"peak(timm.create_model('hf-hub:{REPO}', pretrained=True, cache_dir=cache))") == "0.0 10\n"


def bare_config():
    config = json.loads((SHIPPED / "config.json").read_text())
    del config["eqzoo"]
    return json.dumps(config).encode()


def test_configs_that_cannot_be_built_are_named(hub, client):
    upload(hub, **{"config.json": bare_config().replace(b'"p4_cnn"', b'"p9_cnn"')})
    _, error = client(f"eqzoo.create_model('hf-hub:{REPO}', pretrained=True, cache_dir=cache)")
    assert "is of the network 'p9_cnn'" in error
    upload(hub, **{"config.json": b"{"})
    _, error = client(f"eqzoo.create_model('hf-hub:{REPO}', pretrained=True, cache_dir=cache)")
    assert "is not JSON" in error
    hub.repos[REPO].clear()
    hub.commit(REPO, {"config.json": bare_config()})
    _, error = client(f"eqzoo.create_model('hf-hub:{REPO}', pretrained=True, cache_dir=cache)")
    assert "no model.safetensors from" in error


PUSH_FAILURES = ("unauthorized", "forbidden", "error", "bad_card", "dies_commit")


@pytest.mark.parametrize("failure", PUSH_FAILURES)
@pytest.mark.parametrize("exists", [False, True])
def test_a_push_that_fails_leaves_folder_and_repo(hub, client, run, tmp_path, failure, exists):
    client.run(f"publish.main([{str(run)!r}])")
    folder = tmp_path / "tree" / "model_cards" / NAME
    before = snapshot(folder)
    if exists:
        hub.commit(REPO, {"README.md": b"by hand"})
    there = files(hub, REPO)
    hub.failing.add(failure)
    _, error = client(f"publish.main([{str(folder)!r}, '--push', 'eqzoo'])")
    assert error.startswith("SystemExit: nothing was committed to")
    assert TOKEN not in error
    assert snapshot(folder) == before
    assert files(hub, REPO) == there
    hub.failing.clear()
    assert "uploaded" in client.run(f"publish.main([{str(folder)!r}, '--push', 'eqzoo'])")
    assert files(hub, REPO) == before


def test_nothing_is_asked_of_the_hub_without_a_login_or_push(hub, client, run, tmp_path):
    client.run(f"publish.main([{str(run)!r}]); del os.environ['HF_TOKEN']")
    _, error = client(f"publish.main([{str(tmp_path / 'tree' / 'model_cards' / NAME)!r}, '--push', 'eqzoo'])")
    assert error.startswith("SystemExit: nothing was committed to")
    assert hub.requests == []
    _, error = client(f"os.environ['HF_TOKEN'] = 'hf_wrong'; publish.main([{str(run)!r}, '--push', 'eqzoo'])")
    assert "401" in error
    assert "hf_wrong" not in error
    assert REPO not in hub.repos


def test_a_repo_is_private_if_asked_for(hub, client, run):
    client.run(f"publish.main([{str(run)!r}, '--push', 'eqzoo'])")
    assert REPO not in hub.private
    hub.repos.clear()
    client.run(f"publish.main([str(publish.CARDS / {NAME!r}), '--push', 'eqzoo', '--private'])")
    assert REPO in hub.private


def test_an_onnx_file_beside_the_same_weights_is_not_in_the_way(hub, client, run):
    client.run(f"publish.main([{str(run)!r}, '--push', 'eqzoo'])")
    hub.commit(REPO, {**hub.files(REPO), "model.onnx": b"of another version"})
    command = f"publish.main([str(publish.CARDS / {NAME!r}), '--push', 'eqzoo'])"
    assert "uploaded nothing" in client.run(command)
    hub.commit(REPO, {**hub.files(REPO), "model.bin": b"others"})
    assert "holds other weights (model.bin); --replace" in client(command)[1]


def test_other_weights_are_replaced_only_on_demand(hub, client, run, tmp_path):
    client.run(f"publish.main([{str(run)!r}, '--push', 'eqzoo'])")
    first = files(hub, REPO)
    other = make_run(tmp_path / "other", scale=0.5)
    _, error = client(f"publish.main([{str(other)!r}, '--push', 'eqzoo'])")
    assert "holds other weights; --replace puts these in their place" in error  # the local folder
    client.run(f"import shutil; shutil.rmtree(publish.CARDS); publish.main([{str(other)!r}])")
    command = f"publish.main([str(publish.CARDS / {NAME!r}), '--push', 'eqzoo'{{}}])"
    _, error = client(command.format(""))
    assert "holds other weights (model.safetensors); --replace" in error  # the repo
    assert files(hub, REPO) == first
    client.run(command.format(", '--replace'"))
    assert files(hub, REPO)["model.safetensors"] == (other / "model.safetensors").read_bytes()
    hub.commit(REPO, files(hub, REPO) | {"pytorch_model.bin": b"somebody else's", "notes.txt": b""})
    _, error = client(command.format(""))
    assert "holds other weights (pytorch_model.bin)" in error
    client.run(command.format(", '--replace'"))
    assert set(files(hub, REPO)) == FILES | {"notes.txt"}


def test_a_fine_tuned_network_is_published_by_its_owner_and_loaded_back(hub, client, tmp_path):
    model = f"""
torch.manual_seed(1)
model = eqzoo.create_model({f"local-dir:{SHIPPED}"!r}, pretrained=True, num_classes=3, in_chans=3)
"""
    output = make_run(tmp_path / "mine")
    client.run(model + f"safetensors.torch.save_file(model.state_dict(), {str(output / 'model.safetensors')!r})")
    rows = [
        {"name": name, "precision": 90.0, "recall": 90.0, "f1": 90.0, "images": 9} for name in ("round", "long", "torn")
    ]
    state_of_weights(output, checkpoint="p4_cnn.cells", data="cells", classes=rows, confusion=None)
    config = json.loads((output / "config.json").read_text())
    config |= {"label_names": ["round", "long", "torn"], "num_classes": 3}
    config["model_args"] |= {"num_classes": 3, "in_chans": 3}
    config["pretrained_cfg"] |= {"num_classes": 3, "input_size": [3, 28, 28], "mean": [0.1] * 3, "std": [0.3] * 3}
    (output / "config.json").write_text(json.dumps(config))
    client.run(f"from eqzoo.cards import write_card; write_card(pathlib.Path({str(output)!r}))")
    client.run(
        f"from eqzoo.cli.main import main; words = ['--base-model', {REPO!r}, '--push', 'someone']\n"
        f"assert main(['publish', {str(output)!r}, *words]) == 0"
    )
    card = files(hub, "someone/p4_cnn.cells")["README.md"].decode()
    assert f"base_model: {REPO}" in card
    assert 'create_model("hf-hub:someone/p4_cnn.cells"' in card
    assert "round, long, torn" in " ".join(card.split())
    assert "digits" not in card
    for door in (f"local-dir:{output}", "hf-hub:someone/p4_cnn.cells"):
        for builder in ("eqzoo", "timm"):
            found = client.run(f"""
loaded = {builder}.create_model({door!r}, pretrained=True, cache_dir=cache).eval()
x = torch.randn(2, *loaded.input_size)
print(torch.equal(loaded(x), model.eval()(x)), loaded.input_size, loaded.pretrained_cfg["label_names"])
""")
            assert found.startswith("True (3, 28, 28) ")
            assert all(name in found for name in ("round", "long", "torn"))
    # A folder with another name has the same card, and what its owner writes into it stays.
    output = output.rename(tmp_path / "renamed")
    again = f"assert main(['publish', {str(output)!r}, '--push', 'another']) == 0"
    assert "was edited" not in client.run(again)
    assert 'create_model("hf-hub:another/p4_cnn.cells"' in files(hub, "another/p4_cnn.cells")["README.md"].decode()
    text = card + "\nStained by hand.\n"
    (output / "README.md").write_text(text)
    again = f"assert main(['publish', {str(output)!r}, '--push', 'someone']) == 0"
    assert "README.md was edited, and is taken as it is" in client.run(again)
    licensed = f"assert main(['publish', {str(output)!r}, '--license', 'cc-by-4.0']) == 0"
    assert "does not say 'license: cc-by-4.0'" in client.run(licensed)
    back = f"assert main(['publish', {str(output)!r}, '--license', 'mit']) == 0"
    assert "mit in place of cc-by-4.0" in client.run(back)
    assert files(hub, "someone/p4_cnn.cells")["README.md"].decode() == text == (output / "README.md").read_text()
    # In a folder of checkpoints it goes by the folder's name, and more classes can be put on it in turn.
    client.run(f"os.environ['EQZOO_WEIGHTS'] = {str(tmp_path / 'own')!r}")
    shutil.copytree(output, tmp_path / "own" / "p4_cnn.cells")
    found = client.run("print(eqzoo.create_model('p4_cnn.cells', pretrained=True).num_classes)")
    found += client.run("print(eqzoo.create_model('p4_cnn.cells', pretrained=True, num_classes=7).num_classes)")
    client.run("del os.environ['EQZOO_WEIGHTS']")
    assert found == "3\n7\n"
