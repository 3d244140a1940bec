"""Plans of fine-tunings without reading images or weights."""

from types import SimpleNamespace

from eqzoo.analysis.sizes import weightless
from eqzoo.engine.recipe import Recipe
from eqzoo.finetuning.images import OwnImages
from eqzoo.finetuning.plan import Plan, Request


def plan_of(splits, name="p4_cnn", *, start=None, native=None, drawn=(), image_side=None, recipe=None, speed=None,
            given=None, **request):  # fmt: skip
    """The plan of a request, of which ``given`` are the keys of a recipe."""
    blank = weightless(name)
    shape = list(splits["train"].shape)
    settings = {"start": start, "input_size": shape, "data": "own", "label_names": ["a", "b", "c"]}
    settings |= {"mean": [0.5], "std": [0.5]}
    source = SimpleNamespace(image_side=image_side, folder=None, architecture=name, model_args={}, config={}, name=name)
    images = OwnImages(splits, frozenset(drawn), (), {}, ())
    recipe = recipe or Recipe(name, "own", epochs=1, augment="affine")
    request = Request(name, splits, "out", recipe=given or {}, **request)
    plan = Plan(request, source, blank, images, settings, recipe, speed)
    plan.__dict__["native"] = native  # in place of reading it off the files
    return plan
