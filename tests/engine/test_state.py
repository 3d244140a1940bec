"""What a recipe can ask of the loop: each option does what it says."""

import re
import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import timm.optim.muon as muon_of_timm
import torch
from safetensors.torch import load_file
from timm.optim import Muon

import eqzoo
from eqzoo.data import Split, Streamed
from eqzoo.engine import Recipe, RunDirectory, best_row, cuda_graph, train
from eqzoo.engine import state as state_module
from eqzoo.engine.cuda_graph import RecordedStep, set_capturable
from eqzoo.engine.loop import accelerator_of
from eqzoo.engine.state import TrainingState, _criterion
from tests.engine.bars import (
    RECIPE,
    SPLITS,
    build,
    build_without_batch_norm,
    go,
    losses,
    other,
    predictions,
    rows,
    same,
)


def test_recorded_passes_go_with_one_process(monkeypatch):
    two = SimpleNamespace(device=torch.device("cpu"), num_processes=2)
    with pytest.raises(AttributeError, match="prepare_model"):  # a CPU records nothing, and gets as far as this
        TrainingState(other(cuda_graphs=True), build, SPLITS, two, 0)
    monkeypatch.setattr(TrainingState, "_records", True)
    with pytest.raises(ValueError, match="cuda_graphs goes with one process, got 2; set it to false"):
        TrainingState(other(cuda_graphs=True), build, SPLITS, two, 0)


@pytest.mark.parametrize("reset_fails", [False, True])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), RuntimeError("cannot wait")], ids=["memory", "wait"])
def test_a_failed_recording_is_ended(monkeypatch, error, reset_fails):
    """On a stand-in for a GPU: the stream before is back, and the error is that of the recording."""
    streams, graphs = [], []

    @contextmanager
    def graph(recorded, **_):
        graphs.append(recorded)
        if reset_fails and len(graphs) == 2:
            raise RuntimeError("the GPU is lost")
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "before")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: torch.ones(1))

    def fails():
        raise error

    memory = isinstance(error, torch.OutOfMemoryError)
    said = "full" if memory else "Linear cannot be recorded as a CUDA graph; set cuda_graphs=false: cannot wait"
    with pytest.raises(torch.OutOfMemoryError if memory else ValueError, match=said):
        cuda_graph._record("its own", fails, "Linear")
    assert streams == ["before"]
    assert len(graphs) == 2
    assert graphs[0] == "its own" != graphs[1]


def of_any_size():
    """A network that takes images of 14 pixels, which p4_cnn does not."""
    model = build_without_batch_norm()
    weight = model.head.weight
    model.forward = lambda x: torch.stack([x.mean((1, 2, 3)) * weight.sum(), x.amax((1, 2, 3)) * weight.norm()], 1)
    return model


class Counted:
    """Stands for a recorded pass where there is no GPU."""

    made: ClassVar[list[torch.dtype]] = []

    def __init__(self, run, model, inputs):
        self.run = run
        self.made.append(inputs[0].dtype)

    def __call__(self, *inputs):
        return self.run(*inputs)


def test_a_pass_is_recorded_once_and_anew_at_another_size_or_format(tmp_path, monkeypatch):
    recipe = other(epochs=3, half_size_epochs=1)
    plain = go(tmp_path / "plain", recipe, of_any_size)
    monkeypatch.setattr("eqzoo.engine.state.RecordedPass", Counted)
    monkeypatch.setattr(TrainingState, "_records", True)
    monkeypatch.setattr(RecordedStep, "fits", lambda _: False)
    Counted.made.clear()
    assert same(plain, go(tmp_path / "recorded", recipe, of_any_size))
    assert len(Counted.made) == 2
    train_split = SPLITS["train"]
    state = TrainingState(other(), build, {"train": train_split}, accelerator_of("cpu"), 0)
    for expected, changes in ((3, {}), (3, {}), (4, {"precision": "bfloat16"}), (5, {})):  # as finetune tries formats
        state.recipe = other(**changes)
        state.backward(train_split.images[:4], train_split.labels[:4], torch.zeros(4, 0))
        assert len(Counted.made) == expected


def test_a_recording_keeps_the_memory_that_its_replays_read(monkeypatch):
    """On a stand-in for a GPU: `train` and `eval` put other tables of indices in the place of those recorded."""
    model = eqzoo.create_model("p4_cnn")
    monkeypatch.setattr(cuda_graph, "_record", lambda graph, run, name: run())
    monkeypatch.setattr(cuda_graph.RecordedPass, "_warm_up", lambda self, run: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    read = {name: weakref.ref(buffer) for name, buffer in model.named_buffers()}
    recorded = cuda_graph.RecordedPass(lambda x: model(x).sum().detach(), model, [torch.zeros(2, 1, 28, 28)])
    model.eval().train()
    now = dict(model.named_buffers())
    assert any(ref() is not now[name] for name, ref in read.items())  # a negative control
    assert all(ref() is not None for ref in read.values())
    del recorded
    assert any(ref() is None for ref in read.values())


class Capturable(torch.optim.Optimizer):
    """Steps down the gradient and counts; all that changes may be in tensors."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0, "capturable": False})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("step", torch.zeros(())).add_(1)
                p.data.sub_(p.grad * group["lr"])


def test_the_step_of_the_optimizer_is_recorded_once_and_follows_the_rate(monkeypatch):
    """On a stand-in for a GPU: a recording runs nothing, a replay runs what was recorded."""
    recorded = []

    def record(graph, run, name):
        assert name == "the step of Capturable"
        recorded.append(run)
        graph.replay = run

    monkeypatch.setattr(cuda_graph, "_record", record)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    weight, other_weight = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = Capturable([{"params": [weight]}, {"params": [other_weight]}])
    step, total = RecordedStep(optimizer), 0.0
    for i in range(6):
        weight.grad, other_weight.grad = torch.ones(2), torch.ones(2)
        optimizer.param_groups[0]["lr"] = 2.0**-i
        step()
        total += 2.0**-i
        assert [group["lr"] for group in optimizer.param_groups] == [2.0**-i, 1.0]
        assert torch.equal(weight, weight.new_full((2,), -total))
        assert torch.equal(other_weight, weight.new_full((2,), -i - 1.0))
        assert len(recorded) == (i >= 3)
    assert optimizer.state_dict()["param_groups"][0]["capturable"] is True
    set_capturable(optimizer, False)
    assert not any(group["capturable"] for group in optimizer.param_groups)
    assert optimizer.state[weight]["step"] == 6


def test_which_optimizers_have_their_step_recorded():
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    for kind in (torch.optim.Adam, torch.optim.AdamW, Muon):
        assert RecordedStep.fits(kind([weight], lr=1.0))
    for kind in (torch.optim.SGD, torch.optim.NAdam, torch.optim.RMSprop):
        assert not RecordedStep.fits(kind([weight], lr=1.0))
    assert not RecordedStep.fits(torch.optim.AdamW([weight], lr=1.0, fused=True))


def test_the_number_of_steps_stays_where_a_fused_optimizer_has_it():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones(2)
    optimizer.step()
    steps = optimizer.state[weight]["step"]
    set_capturable(optimizer, False)
    assert optimizer.state[weight]["step"] is steps


def test_a_run_with_recorded_steps_goes_on_without_them():
    """As one that moves from a GPU to a CPU, where torch's AdamW takes no recording."""
    torch.set_default_dtype(torch.float32)
    split = SPLITS["train"]
    before, after = (
        TrainingState(other(optimizer="adamw"), build, {"train": split}, accelerator_of("cpu"), 0) for _ in range(2)
    )
    for state in (before, after):
        if state is after:
            saved = before.state_dict()
            for group in saved["optimizer"]["param_groups"]:
                group["capturable"] = True
            after.load_state_dict(saved)
        state.backward(split.images[:4], split.labels[:4], torch.zeros(4, 0))
        state.step(0, 0)
    steps = [state["step"] for state in after.optimizer.state.values()]
    assert steps
    assert all(step == 2 for step in steps)


def test_averaged_weights_are_the_ones_kept(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "finish", lambda self: None)
        go(tmp_path, other(ema_decay=0.5, epochs=4))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    best = load_file(tmp_path / "model.safetensors")
    assert not torch.equal(state["model"]["head.weight"], state["ema"]["head.weight"])
    assert best_row(rows(tmp_path))["epoch"] == 4
    assert all(torch.equal(best[name], value) for name, value in state["ema"].items())


def test_channels_last(tmp_path):
    seen = []

    def watched():
        model = build_without_batch_norm()
        model.register_forward_pre_hook(lambda _, args: seen.append(args[0].stride(1)))
        return model

    go(tmp_path / "last", other(channels_last=True), watched)
    assert set(seen) == {1}
    seen.clear()
    go(tmp_path / "first", other(), watched)
    assert set(seen) == {28 * 28}
    assert losses(tmp_path / "last") == pytest.approx(losses(tmp_path / "first"), rel=1e-3)


def test_the_first_epochs_see_images_at_half_their_side_and_are_not_chosen(tmp_path, monkeypatch):
    seen, accuracies = [], iter([99.0, 98.0, 50.0, 40.0])

    def watched():
        model = build()

        def forward(x):  # p4_cnn takes no images of 14 pixels
            seen.extend([] if x.is_meta else [x.shape[2]])
            return x.mean((2, 3)).expand(-1, 2) * model.head.weight.sum()

        model.forward = forward
        return model

    validate = TrainingState.validate
    monkeypatch.setattr(TrainingState, "validate", lambda self: validate(self) | {"valid_accuracy": next(accuracies)})
    go(tmp_path / "half", other(epochs=4, half_size_epochs=2, ema_decay=None), watched)
    assert set(seen[: len(seen) // 2]) == {14}
    assert set(seen[len(seen) // 2 :]) == {28}
    best = best_row(rows(tmp_path / "half"))
    assert (best["epoch"], best["valid_accuracy"]) == (3, 50.0)  # of the two at full size


def test_sizes_are_checked_before_the_epochs_at_half_size(tmp_path):
    split = Split(torch.zeros(16, 1, 28, 28, dtype=torch.uint8), torch.arange(16) % 2)
    with pytest.raises(ValueError, match="half_size_epochs=2 trains on 14 x 14 pixels too: "):
        train(other(epochs=4, half_size_epochs=2), build, {"train": split}, tmp_path)
    odd = Split(split.images[..., :27], split.labels)
    with pytest.raises(ValueError, match="half_size_epochs=2 needs even sides, images are 28 x 27"):
        train(other(epochs=4, half_size_epochs=2), build, {"train": odd}, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("classes", "kept"), [((), True), (tuple("0123456789"), True), (tuple("abcdefghij"), False)], ids=str
)
def test_the_classifier_of_other_classes_is_not_started_from(classes, kept):
    torch.set_default_dtype(torch.float32)
    split = Split(torch.zeros(10, 1, 28, 28, dtype=torch.uint8), torch.arange(10), classes)
    recipe = other(start="p4_cnn.rotmnist", batch_size=10, model_args={})
    state = TrainingState(recipe, lambda: eqzoo.create_model("p4_cnn"), {"train": split}, accelerator_of("cpu"), 0)
    trained = eqzoo.create_model("p4_cnn.rotmnist", pretrained=True).state_dict()
    for name, value in state.model.state_dict().items():
        assert torch.equal(value, trained[name]) == (kept or not name.startswith("head.")), name


def test_a_deeper_network_begins_as_the_one_that_it_starts_from():
    torch.set_default_dtype(torch.float32)
    split = Split(torch.randint(256, (10, 3, 32, 32), dtype=torch.uint8), torch.arange(10))
    recipe = Recipe("z2_resnet83", "bars", epochs=1, batch_size=10, start="z2_resnet29.cifar10")
    state = TrainingState(recipe, lambda: eqzoo.create_model("z2_resnet83"), {"train": split}, accelerator_of("cpu"), 0)
    start = eqzoo.create_model("z2_resnet29.cifar10", pretrained=True).eval()
    images = split.images.float() / 255
    torch.testing.assert_close(state.model.eval()(images), start(images))
    assert (eqzoo.create_model("z2_resnet83").eval()(images) - start(images)).abs().max() > 1
    wider = replace(recipe, model="z2_resnet29", start="z2_se_resnet29.cifar10")
    with pytest.raises(RuntimeError, match="Unexpected key"):
        TrainingState(wider, lambda: eqzoo.create_model("z2_resnet29"), {"train": split}, accelerator_of("cpu"), 0)


def test_bfloat16(tmp_path):
    model = go(tmp_path / "half", other(precision="bfloat16"))
    go(tmp_path / "single", other())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert losses(tmp_path / "half") != losses(tmp_path / "single")
    assert losses(tmp_path / "half") == pytest.approx(losses(tmp_path / "single"), rel=0.05)


def test_class_weights(tmp_path):
    model = go(tmp_path, other(class_weights=(0.0, 1.0), lr=1e-2))
    valid = (SPLITS["valid"].images.float() / 255 - 0.1314) / 0.3025
    assert predictions(model, valid).tolist() == [1] * 16
    # One of two classes is recognized, whatever their sizes.
    assert RunDirectory(tmp_path).rows()[-1]["valid_recall"] == 50.0
    # A class without validation images does not count.
    one = SPLITS | {"valid": SPLITS["valid"][SPLITS["valid"].labels == 1]}
    torch.set_default_dtype(torch.float32)
    train(other(class_weights=(0.0, 1.0), lr=1e-2), build_without_batch_norm, one, tmp_path / "one")
    assert RunDirectory(tmp_path / "one").rows()[-1]["valid_recall"] == 100.0
    with pytest.raises(ValueError, match="3 factors for 2 classes"):
        go(tmp_path / "3", other(class_weights=(1.0, 1.0, 1.0)))


@pytest.mark.parametrize("label", [0, 1])
def test_smoothed_labels_keep_their_class_whatever_its_weight(label):
    """The loss of an image has its minimum at the smoothed label: 600 images of one class and 25 of another."""
    criterion = _criterion(other(class_weights=(0.52, 12.5), label_smoothing=0.1), torch.device("cpu"))
    share = torch.linspace(0.01, 0.99, 99)  # of class 1
    losses = [criterion(torch.stack([1 - p, p]).log()[None], torch.tensor([label])).item() for p in share]
    assert share[torch.tensor(losses).argmin()] == pytest.approx([0.05, 0.95][label])
    weighted, plain = (_criterion(other(class_weights=w), torch.device("cpu")) for w in ((0.52, 12.5), ()))
    logits, labels = torch.randn(6, 2), torch.tensor([0, 1, 0, 0, 1, 0])
    both = (
        plain(logits[labels == 0], labels[labels == 0]) * 4 * 0.52
        + plain(logits[labels == 1], labels[labels == 1]) * 2 * 12.5
    )
    torch.testing.assert_close(weighted(logits, labels), both / 6)


def test_what_is_frozen_stays(tmp_path):
    torch.manual_seed(RECIPE.seed)
    torch.set_default_dtype(torch.float32)
    first = build().state_dict()
    model = go(tmp_path, other(freeze=("stem", "blocks.0"), lr=1e-2), build)
    for name, value in model.state_dict().items():
        stays = name.startswith(("stem.", "blocks.0."))
        assert torch.equal(value, first[name]) == stays, name
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="such as stem, blocks"):
        go(tmp_path / "no", other(freeze=("trunk",)))


def test_parts_learn_at_rates_of_their_own(tmp_path):
    """The first step of plain SGD moves the weights by rate times gradient."""
    torch.set_default_dtype(torch.float32)
    values = {"optimizer": "momentum", "weight_decay": 0.0, "epochs": 1, "batch_size": 48, "warmup_epochs": 0}
    values["schedule"] = "constant"
    torch.manual_seed(RECIPE.seed)
    first = build_without_batch_norm().state_dict()

    def moved(**changes):
        name = str(len([*tmp_path.iterdir()]))
        model = go(tmp_path / name, other(**values, **changes), build_without_batch_norm).state_dict()
        return {n: model[n] - first[n] for n in ("stem.conv.weight", "head.weight")}

    one, of_layers = moved(), moved(layer_decay=0.5)
    for decay, plain in ((None, one), (0.5, of_layers)):
        found = moved(layer_decay=decay, lr_factors={"head.*": 4.0, "*.weight": 0.5})
        for name, factor in (("stem.conv.weight", 0.5), ("head.weight", 2.0)):
            torch.testing.assert_close(found[name], factor * plain[name], rtol=1e-3, atol=1e-7)
    assert (of_layers["stem.conv.weight"] - one["stem.conv.weight"]).norm() > 0.1 * one["stem.conv.weight"].norm()


def test_factors_of_rates_of_no_parameter(tmp_path):
    go(tmp_path / "some are frozen", other(lr_factors={"*.weight": 0.1}, freeze=("stem",), epochs=1, warmup_epochs=0))
    for changes in ({}, {"freeze": ("stem",)}):
        pattern = "stem.*" if changes else "*.query.*"
        with pytest.raises(ValueError, match=rf"lr_factors: '{re.escape(pattern)}' matches no trained parameter"):
            go(tmp_path / "none", other(lr_factors={pattern: 0.1}, **changes))


def test_images_that_are_streamed_train_alike(tmp_path):
    images = SPLITS["train"].images
    streamed = Streamed(images.__getitem__, torch.arange(48), SPLITS["train"].labels, (1, 28, 28))
    torch.set_default_dtype(torch.float32)
    recipe = other(augment="standard", epochs=2)
    one = train(recipe, build, {"train": streamed, "valid": SPLITS["valid"]}, tmp_path / "streamed", workers=2)
    assert same(one, go(tmp_path / "memory", recipe, build))


@pytest.mark.parametrize(("part", "shift"), [("train", 1), ("valid", -1)])
def test_labels_that_do_not_suit_the_network(tmp_path, part, shift):
    shifted = SPLITS | {part: replace(SPLITS[part], labels=SPLITS[part].labels + shift)}
    with pytest.raises(ValueError, match="labels are from 0 to 1 in a network of 2 classes"):
        go(tmp_path, splits=shifted)


@pytest.mark.parametrize(("emulates", "dtype"), [(False, None), (True, torch.float32)])
def test_muon_computes_in_float32_where_bfloat16_is_emulated(monkeypatch, emulates, dtype):
    original, found = muon_of_timm.zeropower_via_newtonschulz, []

    def watched(*args, **kwargs):
        found.append(kwargs.get("dtype"))
        return original(*args, **kwargs)

    monkeypatch.setattr(muon_of_timm, "zeropower_via_newtonschulz", watched)
    monkeypatch.setattr(state_module, "emulates_bfloat16", lambda device: emulates)
    recipe = replace(RECIPE, optimizer="nmuon", model_args={})  # Muon takes no matrices as small as those of the others
    state = TrainingState(recipe, lambda: eqzoo.create_model("p4_cnn"), SPLITS, accelerator_of("cpu"), 0)
    split = state.splits["train"]
    state.backward(split.images[:4], split.labels[:4], torch.zeros(4, 0))
    state.step(0, 0)
    assert found
    assert set(found) == {dtype}
    assert muon_of_timm.zeropower_via_newtonschulz is watched
