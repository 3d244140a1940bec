"""Visualization: attention weights against the layers' outputs, equivariance of maps, and legible figures."""

import dataclasses
import io
import itertools
import sys

import matplotlib
import pytest
import timm
import torch
from torch import nn

import eqzoo
from eqzoo import layers, viz
from eqzoo.equivariance import equivariance_report, randomize_norms
from eqzoo.groups import P4, P4M, Z2, Group, cyclic, transform
from eqzoo.models.octic_vit import OcticViT
from tests import forks


def trained_like(name):
    """A network with random norms and biases, as after training, and an image."""
    model = eqzoo.create_model(name).double().eval()
    randomize_norms(model, torch.Generator().manual_seed(0), torch.randn(2, *model.input_size))
    return model, torch.randn(*model.input_size)


@pytest.mark.parametrize("group", [P4, P4M])
@pytest.mark.parametrize("attention", ["full", "channel", "spatial"])
@pytest.mark.parametrize("lifting", [True, False])
def test_response_weights_give_the_layers_output(group, attention, lifting):
    kind = layers.AttentiveLiftingConv2d if lifting else layers.AttentiveGroupConv2d
    make = {"padding": 1, "attention": attention, "attention_size": 3, "attention_dilation": 2}
    layer, other = (kind(group, 2, 3, 3, **make) for _ in range(2))
    x = torch.randn(2, 2, 7, 7) if lifting else torch.randn(2, 2, group.order, 7, 7)
    found = viz.response_weights(layer, x)
    torch.testing.assert_close(found.output, layer(x))
    assert (found.channel is None, found.spatial is None) == (attention == "spatial", attention == "channel")
    assert (viz.response_weights(other, x).output - layer(x)).abs().max() > 1e-2


@pytest.mark.parametrize("field", ["regular", "trivial"])
@pytest.mark.parametrize("attention", ["input", "pose"])
def test_input_weights_give_the_layers_output(field, attention):
    layer = layers.InputAttention2d(P4M, 3, field, attention, attention_size=3, attention_dilation=2)
    x = torch.randn(2, 3, 7, 7) if field == "trivial" else torch.randn(2, 3, 8, 7, 7)
    found = viz.input_weights(layer, x)
    torch.testing.assert_close(found.output, layer(x))
    assert (found.output - x).abs().max() > 1e-2


@pytest.mark.parametrize("group", [P4, P4M])
@pytest.mark.parametrize(
    "kind", [layers.AffineSelfConv2d, layers.SimpleAffineSelfConv2d, layers.StandAloneSelfAttention2d]
)
def test_window_weights_give_the_layers_output(group, kind):
    layer, x = kind(group, 8, kernel_size=3, num_heads=4), torch.randn(2, 8, group.order, 5, 5)
    weights, values = viz.window_weights(layer, x)
    torch.testing.assert_close(weights.sum(3), torch.ones_like(weights.sum(3)))
    out = layer.project((weights.unsqueeze(2) * values).sum(4).flatten(1, 2))
    torch.testing.assert_close(out, layer(x))
    mean = layer.project(values.mean(4).flatten(1, 2))
    assert (mean - layer(x)).abs().max() > 1e-2


@pytest.mark.parametrize("kernel_size", [3, "global"])
@pytest.mark.parametrize("kind", ["lifting", "group"])
def test_group_weights_give_the_layers_output(kernel_size, kind):
    options = {"kernel_size": kernel_size, "num_heads": 2, "head_channels": 6}
    if kind == "lifting":
        layer, x = layers.LiftingSelfAttention2d(cyclic(8), 2, 4, **options), torch.randn(2, 2, 4, 5)
    else:
        layer = layers.GroupSelfAttention2d(P4, 2, 4, **options)
        x = torch.randn(2, 2, 4, 4, 5)
    weights, values = viz.group_weights(layer, x, torch.arange(20))
    torch.testing.assert_close(weights.sum((-2, -1)), torch.ones_like(weights.sum((-2, -1))))
    out = layer.merge(torch.einsum("bnvgimj,bncmij->bncvi", weights, values).unflatten(-1, (4, 5)))
    torch.testing.assert_close(out, layer(x))
    some, head = viz.group_weights(layer, x, torch.tensor([7, 3]), slice(1, 2))
    torch.testing.assert_close(some, weights[:, 1:, :, :, [7, 3]])
    assert (some - weights[:, 1:, :, :, [3, 7]]).abs().max() > 1e-4
    assert head.shape[1] == 1


CASES = [
    ("p4_alpha_cnn", "blocks.1.conv", {}),
    ("p4_alpha_cnn", "stem.conv", {"head": 3}),
    ("p4_alpha_ch_cnn", "blocks.0.conv", {}),
    ("p4_alpha_f_cnn", None, {}),
    ("p4_alpha_f_cnn", "stem.conv", {}),
    ("p4_alpha_rh_cnn", None, {}),
    ("r4_gsanet_t", None, {}),
    ("r4_gsanet_t", "blocks.2.block.attention.attention", {}),
    ("r8_gsanet_t", "blocks.0.block.attention.attention", {"place": (4, 9), "head": 2, "pose": 3}),
    ("p4_asc_resnet29", None, {"head": 1}),
    ("p4m_asc_resnet29", None, {"place": (3, 30)}),
    ("p4m_e4net", "blocks.1.e4", {}),
    ("p4_e4net", None, {"place": (4, 9), "head": 1}),
]


@pytest.mark.parametrize(("name", "layer", "options"), CASES, ids=lambda value: str(value))
def test_maps_of_a_rotated_image_are_the_rotated_maps_with_their_poses_permuted(name, layer, options):
    model, x = trained_like(name)
    seen = viz.attention(model, x, layer, **options)
    assert seen.error < 1e-10
    assert (len(seen.maps) or len(seen.channels)) == len(model.group.grid_elements)
    for g, maps in zip(seen.elements, seen.maps, strict=False):
        field = "trivial" if len(maps) == 1 else "regular"
        torch.testing.assert_close(maps, transform(seen.maps[0], model.group, g, field), rtol=0, atol=1e-10)
    # Negative control: without permuting the poses, the maps differ.
    if seen.maps and len(seen.maps[0]) > 1:
        rotated = transform(seen.maps[0], model.group, seen.elements[1], "trivial")
        assert (seen.maps[1] - rotated).norm() > 1e-6 * seen.maps[0].norm()


def test_maps_of_a_translation_equivariant_network_are_not_rotated():
    model, x = trained_like("z2_gsanet_t")
    seen = viz.attention(model, x, place=(5, 9))
    assert seen.group == P4
    assert seen.error > 1e-3


def test_attention_received_is_attention_given():
    """Each query position gives 1 in all; windows that extend beyond the image give less to its pixels."""
    for name in ("r4_gsanet_t", "z2_gsanet_t"):
        model, x = trained_like(name)
        maps = viz.attention(model, x).maps[0]
        torch.testing.assert_close(maps.mean((1, 2)), torch.ones(len(maps)))
    model, x = trained_like("z2_sasa_resnet29")
    assert 0.5 < viz.attention(model, x).maps[0].mean() < 1


def test_maps_of_a_position_are_the_softmax_over_its_window():
    model, x = trained_like("p4_asc_resnet29")
    name = next(iter(viz.attention_layers(model)))
    seen = viz.attention(model, x, place=(7, 2), head=1)
    block = model.blocks[0][0]
    fed = block.branch[:3](model.stem(x[None]))
    weights = viz.window_weights(model.get_submodule(name), fed).weights[0, 1, :, :, 7, 2]
    torch.testing.assert_close(seen.maps[0].flatten(1), weights)


def test_attention_of_a_single_layer():
    layer = layers.AttentiveGroupConv2d(P4, 2, 3, 3, attention="spatial")
    seen = viz.attention(layer, torch.randn(1, 2, 4, 9, 9))
    assert (seen.layer, seen.error < 1e-12, seen.maps[0].shape) == ("", True, (4, 7, 7))
    assert viz.attention_maps(seen).axes


def test_errors_say_what_would_work():
    attentive, x = trained_like("p4_alpha_f_cnn")
    gsa, _ = trained_like("r4_gsanet_t")
    on_input = layers.AttentiveGroupConv2d(P4, 2, 2, 3, attention="input")
    for match, call in (
        ("input_weights", lambda: viz.response_weights(on_input, torch.randn(1, 2, 4, 5, 5))),
        ("no layer with attention", lambda: viz.attention(trained_like("p4_cnn")[0], x)),
        ("it is in stem.conv, blocks.0.conv", lambda: viz.attention(attentive, x, "stem")),
        ("no place to choose", lambda: viz.attention(attentive, x, place=(1, 1))),
        ("no head to choose", lambda: viz.attention(attentive, x, head=0)),
        ("head is 9, and this layer has 9 heads", lambda: viz.attention(gsa, x, head=9)),
        ("0 to 3", lambda: viz.attention(gsa, x, "blocks.0.block.attention.attention", pose=4)),
        ("ask for p4 or a subgroup", lambda: viz.attention(gsa, x, group=P4M)),
        ("one image is", lambda: viz.attention(gsa, torch.randn(2, 1, 28, 28))),
        ("regular field of one image", lambda: viz.feature_rings(torch.randn(2, 3, 4, 5, 5))),
        (r"\(C, 8, height, width\)", lambda: viz.feature_rings(torch.randn(3, 4, 5, 5), group="p4m")),
        ("no lifting or group convolution", lambda: viz.filter_orbit(nn.Conv2d(1, 1, 3))),
        ("no map", lambda: viz.error_maps(nn.Flatten(), x[None], group=P4)),
        ("zero everywhere", lambda: viz.error_maps(nn.Identity(), 0 * x[None], group=P4)),
        ("first dimension", lambda: viz.plot_rotation_curve({"a": [1, 2]}, [0, 90, 180])),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(IndexError):
        viz.attention(gsa, x, place=(28, 0))


def test_layers_of_a_deployed_network_are_not_taken_for_planes_without_a_group():
    model = eqzoo.create_model("p4_cnn", pretrained=True).eval()
    deployed, x = timm.utils.reparameterize_model(model), torch.rand(1, 1, 28, 28)
    assert max(viz.error_maps(deployed, x).errors.values()) < 1e-12
    with pytest.raises(ValueError, match=r"the layer 'stem' of a deployed .* the one that it was made of"):
        viz.error_maps(deployed, x, "stem")


def test_orbit_filters_are_the_transformed_filters():
    for layer, field in (
        (layers.LiftingConv2d(P4M, 2, 3, 3), "trivial"),
        (layers.GroupConv2d(P4M, 2, 3, 3), "regular"),
    ):
        filters = viz.orbit_filters(layer)
        for g in P4M.elements:
            torch.testing.assert_close(filters[:, g], transform(filters[:, 0], P4M, g, field))
        assert (filters[:, 1] - filters[:, 0]).abs().max() > 1e-2


def test_error_maps_have_the_norm_of_the_equivariance_error():
    model, x = trained_like("z2_cnn")
    found = viz.error_maps(model, x[None], "stem.conv", P4)
    # equivariance_report measures only the output of z2_cnn under p4, so its stem is measured by hand.
    y, stem = model.stem.conv(x[None])[:, :, 0], model.stem.conv
    for g in P4.grid_elements:
        difference = stem(transform(x[None], P4, g, "trivial"))[:, :, 0] - transform(y, P4, g, "trivial")
        assert found.errors[g] == pytest.approx((difference.norm() / y.norm()).item(), abs=1e-12)
    assert found.errors[1] > 0.1
    exact, x = trained_like("p4m_cnn")
    report = equivariance_report(exact, x[None])
    assert max(viz.error_maps(exact, x[None]).errors.values()) == pytest.approx(
        max(report.features.values()), abs=1e-14
    )


def test_error_maps_localize_an_error():
    class Corner(nn.Module):
        group = Group(4)

        def forward(self, x):
            y = x.clone()
            y[..., 0, 0] += 1
            return y

    maps = viz.error_maps(Corner(), torch.randn(1, 1, 6, 6)).maps
    assert [tuple(place) for place in (maps[1] > 1e-12).nonzero().tolist()] == [(0, 0), (5, 0)]


def figures():
    p4, x = trained_like("p4_cnn")
    z2, _ = trained_like("z2_cnn")
    p4m, _ = trained_like("p4m_cnn")
    alpha, _ = trained_like("p4_alpha_cnn")
    gsa, _ = trained_like("r4_gsanet_t")
    r16, _ = trained_like("r16_gsanet_t")
    e4, _ = trained_like("p4m_e4net")
    degrees = range(0, 360, 45)
    with torch.no_grad():
        yield "attention", viz.attention_maps(alpha, x, "blocks.0.conv")
        yield "attention of a position", viz.attention_maps(gsa, x, place=(9, 12), head=3)
        yield (
            "a 180° rotation",
            viz.attention_maps(gsa, x, "blocks.0.block.attention.attention", (1, 1), group=cyclic(2)),
        )
        yield "generated filters", viz.attention_maps(e4, x, "blocks.5.e4", place=(1, 1))
        yield "attention at 16 poses", viz.attention_maps(r16, x, place=(1, 1))
        yield "one pose", viz.attention_maps(trained_like("z2_gsanet_t")[0], x, place=(1, 1))
        yield "rings", viz.feature_rings(p4.stem(x[None]), P4, x)
        yield "rings with reflections", viz.feature_rings(p4m.stem(x[None]), P4M, x, fields=range(4))
        yield "orbit", viz.filter_orbit(p4m)
        yield "orbit of a group filter", viz.filter_orbit(p4m.blocks[0].conv, fields=[0, 2])
        yield "error", viz.equivariance_map(p4m, x[None])
        yield "error of a layer", viz.equivariance_map(z2, x[None], "stem.conv")
        yield "curve", viz.plot_rotation_curve({f"network {i}": [i] * 8 for i in range(9)}, degrees)


def test_no_text_of_a_figure_overlaps_another_or_is_cut_off():
    for name, figure in figures():
        assert not faults(figure), name


def test_an_image_is_above_the_curve_at_each_tick_and_not_cut_off():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage

    image = torch.rand(1, 9, 9)
    figure = viz.plot_rotation_curve({"a": [1, 2, 3, 4]}, range(0, 360, 90), image=image)
    assert not faults(figure)
    (axes,) = figure.axes
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = sorted((b.xy[0], b.get_window_extent(renderer)) for b in axes.artists if isinstance(b, AnnotationBbox))
    assert [angle for angle, _ in boxes] == list(range(0, 361, 45))
    assert all(box.y0 > axes.bbox.y1 and box.y1 < figure.bbox.y1 for _, box in boxes)
    assert all(left.x1 < right.x0 for (_, left), (_, right) in itertools.pairwise(boxes))
    shown = {b.xy[0]: b.get_children()[0].get_data() for b in axes.artists if isinstance(b.offsetbox, OffsetImage)}
    rotated = image.rot90(1, (1, 2))[0]
    wanted = (rotated - rotated.min()) / (rotated.max() - rotated.min())
    assert abs(shown[90][..., 0] - wanted.numpy()).max() < 1e-6
    assert abs(shown[0][..., 0] - wanted.numpy()).max() > 0.1


def test_the_check_above_can_fail():
    figure = viz.plot_rotation_curve({"a": [1, 2]}, [0, 90])
    assert not faults(figure)
    figure.axes[0].text(0.5, 0.5, "one", transform=figure.transFigure)
    figure.axes[0].text(0.51, 0.51, "two", transform=figure.transFigure)
    figure.axes[0].text(0.99, 0.6, "three", transform=figure.transFigure)
    assert [fault[:2] for fault in faults(figure)] == [("cut", "three"), ("one", "two")]


def test_titles_keep_clear_of_the_edge_and_markers_are_not_clipped():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    rings = viz.feature_rings(torch.rand(4, 4, 8, 8))
    FigureCanvasAgg(rings).draw()
    titles = [axes.title.get_window_extent() for axes in rings.axes if axes.get_title()]
    assert len(titles) == 4
    assert all(rings.bbox.y1 - box.y1 >= 0.06 * rings.dpi for box in titles)
    curve = viz.plot_rotation_curve({"a": [50.0] * 24})
    FigureCanvasAgg(curve).draw()
    (line,) = (line for line in curve.axes[0].lines if line.get_label() == "a")
    assert (line.get_xdata()[0], line.get_xdata()[-1], line.get_clip_on()) == (0, 360, False)


def test_constant_attention_has_the_middle_color():
    model, x = trained_like("p4_alpha_f_cnn")
    seen = viz.attention(model, x, "blocks.0.conv")
    alike = {name: [torch.full_like(t, 0.5) for t in getattr(seen, name)] for name in ("maps", "channels")}
    figure = viz.attention_maps(dataclasses.replace(seen, **alike))
    drawn = [image for axes in figure.axes for image in axes.images if image.get_array().ndim == 2]
    assert len(drawn) == 4 * 4 + 4
    assert {(image.norm.vmin, image.norm.vmax) for image in drawn} == {(0, 1)}
    # Channel attention of all layers and images is on one scale.
    assert {axes.images[0].norm.vmax for axes in viz.attention_maps(seen).axes if axes.get_xlabel() == "pose"} == {1}


def test_abbreviated_class_names_differ():
    def ticks(names):
        axes = viz.plot_confusion(torch.eye(len(names), dtype=torch.int64).tolist(), names).axes[0]
        return [label.get_text() for label in axes.get_yticklabels()]

    assert ticks([f"a rather long name, number {i}" for i in (7, 17)]) == ["a rather…umber 7", "a rather…mber 17"]
    assert ticks(["sixteen letters.", "b"]) == ["sixteen letters.", "b"]
    assert ticks([f"beginnings {i} and ends alike" for i in range(3)]) == ["0", "1", "2"]


def faults(figure):
    """The texts that are cut off, and the pairs that overlap by a pixel or more."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    page, renderer = figure.bbox, canvas.get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in drawn(figure)]
    assert len(boxes) > 3
    cut = [
        ("cut", text) for text, box in boxes if min(box.x0, box.y0) < -1 or box.x1 > page.x1 + 1 or box.y1 > page.y1 + 1
    ]
    pairs = [
        (a, b)
        for (a, first), (b, second) in itertools.combinations(boxes, 2)
        if min(first.x1, second.x1) - max(first.x0, second.x0) > 1
        and min(first.y1, second.y1) - max(first.y0, second.y0) > 1
    ]
    return cut + pairs


def drawn(figure):
    """The visible texts; matplotlib also lists ticks outside the axes and those of hidden axes."""
    texts = [figure._suptitle, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        texts += [axes.title, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            low, high = sorted(axis.get_view_interval())
            ticks = [tick.label1 if tick.label1.get_visible() else tick.label2 for tick in axis.get_major_ticks()]
            places = axis.get_majorticklocs()
            texts += [axis.label, *(t for t, place in zip(ticks, places, strict=True) if low <= place <= high)]
    return [text for text in texts if text is not None and text.get_text().strip()]


def test_titles_say_whether_a_network_is_equivariant():
    p4, x = trained_like("p4_cnn")
    z2, _ = trained_like("z2_cnn")
    exact, other = (viz.equivariance_map(model, x[None]).axes[0].get_title() for model in (p4, z2))
    assert "0 up to round-off" in exact
    assert "0 up to round-off" not in other
    assert "equivariant up to round-off" in viz.attention_maps(trained_like("p4_alpha_f_cnn")[0], x).get_suptitle()
    assert "not equivariant" in viz.attention_maps(trained_like("z2_gsanet_t")[0], x, place=(3, 3)).get_suptitle()


def test_a_ring_rotates_with_the_image():
    """The ring of a rotated field is the rotated ring: the map at the top moves to the left and is rotated."""
    p4, x = trained_like("p4_cnn")
    field = p4.stem(x[None]).detach()
    rings = [viz.feature_rings(f, P4, fields=[0]).axes[0] for f in (field, transform(field, P4, 1, "regular"))]
    before, after = ({spot(image): torch.tensor(image.get_array().data) for image in ring.images} for ring in rings)
    for (across, along), values in before.items():
        torch.testing.assert_close(after[-along, across], values.rot90(1))


def spot(image):
    left, right, bottom, top = image.get_extent()
    return round((left + right) / 2), round((bottom + top) / 2)


def save_rings(path):
    settings = {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}  # which loads pyplot
    figure = viz.feature_rings(torch.rand(3, 4, 5, 5), P4)
    figure.savefig(path)
    assert "matplotlib.pyplot" not in sys.modules
    assert all(matplotlib.rcParams[key] == value for key, value in settings.items())


def test_figures_do_not_import_pyplot(tmp_path):
    ran = forks.run(save_rings, tmp_path / "rings.png")
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "rings.png").stat().st_size > 1000


def test_without_matplotlib_figures_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert viz.orbit_filters(layers.LiftingConv2d(Z2, 1, 1, 3)).shape == (1, 1, 1, 3, 3)
    with pytest.raises(ImportError, match=r"pip install 'eqzoo\[viz\]'"):
        viz.plot_rotation_curve({"a": [1.0]}, [0])


def test_the_model_is_not_changed():
    model = eqzoo.create_model("p4_alpha_f_cnn").float().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    viz.attention(model, torch.randn(1, 28, 28, dtype=torch.float32))
    viz.error_maps(model, torch.randn(1, 1, 28, 28, dtype=torch.float32))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_error_maps_of_a_network_whose_features_are_tokens():
    octic = OcticViT(num_classes=3, img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2)
    x = torch.randn(1, 3, 16, 16)
    found = viz.error_maps(octic, x)
    assert found.group == P4M
    assert found.maps[5].shape == (4, 4)
    assert max(found.errors.values()) < 1e-12
    hybrid = OcticViT(num_classes=3, img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, invariant=False)
    assert viz.error_maps(hybrid, x, group=P4).errors[1] > 1e-3


def test_names_with_dollars_are_drawn_as_they_are():
    names = ["$_$", "$5-$10"]
    figure = viz.plot_confusion([[1, 0], [0, 1]], names)
    figure.savefig(io.BytesIO())
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == [r"\$_\$", r"\$5-\$10"]
    viz.plot_rotation_curve({"$_$": [1.0, 2.0]}, [0, 90]).savefig(io.BytesIO())
