"""What the pages say: their code runs, prints what they show, and their links lead somewhere."""

import itertools
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import eqzoo
from eqzoo.analysis.sizes import weightless
from eqzoo.cards import render_card
from eqzoo.cli import main as command_line
from eqzoo.layers import GroupConv2d
from eqzoo.models.conversion import foreign_elements
from tests import forks
from tests.conftest import ROOT
from tests.docs import doc_pages

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN_PROCESS = {"adding_a_model.md"}  # pages that register networks
TEACH = {
    "README.md",
    "adding_a_model.md",
    "exactness.md",
    "export.md",
    "fine_tuning.md",
    "images.md",
    "migration.md",
    "new_images.md",
}

OPERATORS = "torch's operators alone"  # a column of the tables


def runs(page):
    return any(block.language == "python" and not block.skipped for block in doc_pages.blocks(page.read_text()))


def title(page):
    return str(page.relative_to(ROOT))


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with the examples and some images in two classes, float32 as a user has it."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "docs" / "images").mkdir(parents=True)
    draw = np.random.default_rng(0)
    for kind in ("long", "round"):
        (tmp_path / "images" / kind).mkdir(parents=True)
        for i in range(10):
            image = draw.integers(0, 40, (32, 32)).astype(np.uint8)
            y, x = draw.integers(11, 21, 2)
            high, wide = (2, 10) if kind == "long" else (5, 5)
            image[y - high : y + high, x - wide : x + wide] = 220
            Image.fromarray(image).save(tmp_path / "images" / kind / f"{i}.png")
    (tmp_path / "slides").mkdir()
    for slide in "abcd":
        Image.fromarray(draw.integers(0, 255, (200, 300, 3)).astype(np.uint8)).save(tmp_path / f"slides/{slide}.png")
        (tmp_path / f"slides/{slide}.csv").write_text("100,90,lymphocyte\n290,10,monocyte\n")
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    return tmp_path


@pytest.mark.parametrize("page", list(filter(runs, PAGES)), ids=title)
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page, desk):
    if page.name in OWN_PROCESS:
        in_its_own_process(the_page_has_code, page)
        publish_what_the_page_made()
    elif page.name == "looking_inside.md":
        make_the_figures(page, desk)
    else:
        assert doc_pages.run(page.read_text(), page.name) > 0


def the_page_has_code(page):
    assert doc_pages.run(page.read_text(), page.name) > 0


def in_its_own_process(function, *args, **environment):
    ran = forks.run(with_modules_of_this_folder, function, *args, environment=environment)
    assert ran.returncode == 0, ran.stderr


def with_modules_of_this_folder(function, *args):
    sys.path.insert(0, "")
    function(*args)


def publish_what_the_page_made():
    """The page's own network goes by its name in a command that does not know its module."""
    in_its_own_process(publish, ["publish", "cells", "--output", "p4_cellnet.cells"], EQZOO_NETWORKS="cellnet")
    card = Path("p4_cellnet.cells/README.md").read_text()
    assert "| multiply-adds an image |" in card
    assert "| throughput, images |" in card
    assert "and the module cellnet, which defines the network and is not part of eqzoo" in " ".join(card.split())
    assert card.count("import cellnet  # defines the network\n") == 2
    assert "    EQZOO_NETWORKS=cellnet eqzoo predict " in card
    assert "torch.hub" not in card
    assert "license" not in card.partition("# p4_cellnet.cells")[0]  # its owner has named none
    assert "license" not in json.loads(Path("p4_cellnet.cells/config.json").read_text())["pretrained_cfg"]
    in_its_own_process(card_again, EQZOO_NETWORKS="cellnet")


def card_again():
    """As `eqzoo publish FOLDER --push` renders it, in a process that has not imported the module."""
    folder = Path("p4_cellnet.cells")
    results, config = (json.loads((folder / f"{name}.json").read_text()) for name in ("results", "config"))
    assert "cellnet" not in sys.modules
    assert "import cellnet  # defines" in render_card(results, config, 1000, "me/x", "x", False)


def publish(words):
    assert command_line.main(words) == 0


def test_a_module_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("EQZOO_NETWORKS", "json, nowhere")
    with pytest.raises(ValueError, match="EQZOO_NETWORKS names the module nowhere, which cannot be imported"):
        eqzoo.list_models()


def make_the_figures(page, desk):
    """The page's code makes the figures that it shows and no others, at their size, with something drawn on each."""
    text = page.read_text()
    command = re.search(r"```bash\neqzoo (.*?)\n```", text)[1]
    assert command_line.main(command.split()) == 0
    assert doc_pages.run(text, page.name) > 0
    shown = set(re.findall(r"\(images/(.*?)\)", text))
    assert {path.name for path in (desk / "docs" / "images").iterdir()} == shown
    assert {path.name for path in (ROOT / "docs" / "images").iterdir()} == shown
    for name in shown:
        there, new = (Image.open(root / "docs" / "images" / name).convert("L") for root in (ROOT, desk))
        assert there.size == new.size, name
        assert new.getextrema()[1] - new.getextrema()[0] > 100, name
        assert (ROOT / "docs" / "images" / name).stat().st_size < 100_000


def test_the_pages_that_teach_by_code_are_run():
    assert {page.name for page in PAGES if runs(page)} >= TEACH


def test_a_page_that_is_wrong_is_noticed(desk):
    """Negative controls: code that fails, other numbers and words, a line too many, a command that says otherwise."""
    good = "```python\nx = 2\n```\n\n```python\nprint('seven', x / 3, 1e-16)\n```\n\n```text\nseven 0.667 3e-15\n```\n"
    assert doc_pages.run(good) == 2
    for said, instead in (
        ("x = 2", "x = y"),
        ("0.667", "0.65"),
        ("seven 0", "eight 0"),
        ("3e-15", "3e-15\nmore"),
        ("3e-15", "3e-1"),
        ("x = 2\n```", "x = 2\n```\n\n```text\n2\n```"),
    ):
        with pytest.raises(AssertionError, match="line"):
            doc_pages.run(good.replace(said, instead, 1))
    skipped = good.replace("```python\nx = 2", "<!-- not run: a reason -->\n```python\nx = y")
    with pytest.raises(AssertionError, match="NameError"):  # x is not there for the second block
        doc_pages.run(skipped)
    listed = "```text\n$ eqzoo list z2_cnn\nz2_cnn\n```\n"
    assert doc_pages.run(listed) == 1
    with pytest.raises(AssertionError, match="p4_cnn"):
        doc_pages.run(listed.replace("\nz2_cnn", "\np4_cnn"))


def dead_links(page, text):
    """The relative links of a page that lead to no file, or to no heading of one."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, heading = target.partition("#")
        place = (page.parent / file) if file else page
        if not place.exists() or (heading and heading not in anchors(text if not file else place.read_text())):
            yield target


def anchors(text):
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\]\(.*?\)", "", heading)).lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=title)
def test_links_lead_somewhere(page):
    assert not list(dead_links(page, page.read_text()))


def test_a_dead_link_is_noticed():
    page = ROOT / "docs" / "conventions.md"
    text = "# A [b](c.md)\n[1](none.md) [2](conventions.md#none) [3](../README.md) [4](#a-b) [5](#b) [6](http://x)\n"
    assert list(dead_links(page, text)) == ["c.md", "none.md", "conventions.md#none", "#b"]


def test_every_page_is_linked_from_the_start_page():
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    links = set(re.findall(r"\]\(([^):]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert links == pages - {"index.md"}


def test_the_readme_is_short():
    """Besides the tables of results: at most six links to other pages, and the less kind comparisons are named."""
    text = (ROOT / "README.md").read_text()
    own = re.sub(r"<!-- results.*<!-- end of results -->", "", text, flags=re.DOTALL)
    assert len(re.findall(r"(?<!!)\[[^]]*\]\([^#)][^)]*\)", own)) <= 6
    headline = " ".join(own.partition("## Try it")[0].split())
    assert "after the same minutes" in headline
    assert "against it the difference is" in headline
    assert "`p4_resnet29` gains nothing" in headline
    count = len(eqzoo.list_models())
    assert f"- **{count} networks under" in headline, f"there are {count} networks"
    plain, ours = (
        np.mean(json.loads((ROOT / "model_cards" / f"{name}.cifar10" / "results.json").read_text())["test_errors"])
        for name in ("z2_resnet29", "p4m_resnet29")
    )
    said = f"times the multiply-adds of the plain network, {plain - ours:.1f} points less by the same recipe, which"
    assert f"at 9 {said} with two seeds each may be chance" in " ".join(own.split())
    for name in ("z2_resnet29", "p4_resnet29", "p4m_resnet29", "p4_asc_resnet29"):
        results = json.loads((ROOT / "model_cards" / f"{name}.cifar10" / "results.json").read_text())
        seeds = results.get("test_errors", [results["test_error"]])
        spread = f" ± {results['test_error_std']:.2f}" if len(seeds) > 1 else ""
        score = f"{np.mean(seeds):.2f}{spread} %"
        (row,) = re.findall(rf"^\| `{name}`\S* .*\|$", own, re.MULTILINE)
        work = round(eqzoo.multiply_adds(weightless(name)) / 1e6)
        assert f"| {score} | {len(seeds)} | {work} M |" in row


def test_the_readme_names_what_equivariance_costs():
    """Against plain networks with as many parameters, in training steps and in predictions of tiles."""
    text = " ".join((ROOT / "README.md").read_text().split())
    ratios, without = {}, {}
    for kind in ("", "_bfloat16"):
        report = json.loads((ROOT / "docs" / "benchmarks" / f"twins_cpu{kind}.json").read_text())
        for row in report["rows"]:
            if row["task"] == "training step":
                ratios[row["subject"] + kind] = f"{row['ms'] / row['ms against']:.1f}"
                without[row["subject"] + kind] = f"{row[OPERATORS]:.1f}"
    p4, p4m = "p4_resnet29", "p4m_resnet29"
    rates, table = {}, (ROOT / "docs" / "speed.md").read_text().partition("## Channels last")[2].partition("\n## ")[0]
    for row in json.loads((ROOT / "docs" / "benchmarks" / "tiles_avx512_cpu.json").read_text())["rows"]:
        if row["form"] == "eager":
            key = f"{row['precision']}, {'channels last' if row['channels_last'] else 'contiguous'}"
            rates.setdefault(key, []).append(row["images_per_second"])
    for key, (ours, plain) in rates.items():
        assert f"| {key} | {ours:.1f} | {plain:.1f} | {plain / ours:.1f} |" in table
    ours, plain = rates["bfloat16, channels last"]
    assert max(rates.values(), key=min) == [ours, plain]
    said = f"{plain / ours:.1f} times as many tiles a second ({plain:.0f} and {ours:.0f}, in bfloat16 and channels last"
    assert said in text
    costs = text.partition("## What it costs")[2].partition(" ## ")[0]
    for kind, name in (("", "float32"), ("_bfloat16", "bfloat16")):
        assert f"| CPU with AVX-512, {name} | {ratios[p4 + kind]} | {ratios[p4m + kind]} |" in costs
        row = f"without a C++ compiler, {name} | {without[p4 + kind]} | {without[p4m + kind]} |"
        assert f"| CPU with AVX-512, {row}" in costs
    table = (ROOT / "docs" / "speed.md").read_text().partition("## Plain networks with as many parameters")[2]
    for subject, ratio in ratios.items():
        if "bfloat16" not in subject:
            row = next(line for line in table.splitlines() if line.startswith(f"| `{subject}` |")).split(" | ")
            assert (row[2], row[3], row[6].removesuffix(" |")) == (
                ratio,
                ratios[f"{subject}_bfloat16"],
                without[subject],
            )
    report = json.loads((ROOT / "docs" / "benchmarks" / "avx2" / "twins_cpu.json").read_text())
    narrow = {(row["subject"], row["task"]): row for row in report["rows"]}
    table = table.partition("## Processors with AVX2")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `\w+` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", table, re.MULTILINE)
    assert len(rows) == len(ratios) / 2
    for subject, *found in rows:
        step, inference = narrow[subject, "training step"], narrow[subject, "inference"]
        expected = (step["ms"] / step["ms against"], inference["ms"] / inference["ms against"], step[OPERATORS])
        assert found == [f"{value:.1f}" for value in expected], subject
    steps = [f"{narrow[name, 'training step']['ratio']:.1f}" for name in (p4, p4m)]
    assert f"| CPU with AVX2 alone, float32 | {' | '.join(steps)} |" in costs
    alone = [f"{narrow[name, 'training step'][OPERATORS]:.1f}" for name in (p4, p4m)]
    assert f"| CPU with AVX2 alone, without a C++ compiler, float32 | {' | '.join(alone)} |" in costs
    headline = text.partition("## Try it")[0]
    said = re.search(r"takes (\S+) to (\S+) times .* one of `p4m_resnet29` (\S+) to (\S+) times", headline).groups()
    cells = re.findall(r"\| ([\d.]+) \| ([\d.]+) \|", costs)
    spans = [sorted(float(row[i]) for row in cells) for i in (0, 1)]
    assert [float(x) for x in said] == [spans[0][0], spans[0][-1], spans[1][0], spans[1][-1]]


def test_the_readme_says_whether_it_pays():
    """Its numbers are those of the studies, with the comparisons that are less kind beside them."""
    text = (ROOT / "README.md").read_text()
    section = " ".join(text.partition("## Does it pay?")[2].partition("\n## ")[0].split())
    table = (ROOT / "docs" / "few_samples.md").read_text()
    rows = [row.split(" | ") for row in table.partition("## CIFAR-10")[0].splitlines() if row.startswith("| 100 ")]
    p4, resnet, longer, _ = (float(row[5].partition(" ")[0]) for row in rows)
    assert f"{p4:.0f} % accuracy" in section
    assert f"a ResNet with about as many parameters {resnet:.0f} %" in section
    assert f"with four times the steps the ResNet has {longer} %" in section
    rows = [row.split(" | ") for row in table.partition("## CIFAR-10")[2].splitlines() if row.startswith("| 100 ")]
    upright = {row[1]: row[4].partition(" ")[0] for row in rows if "no rotations in training" in row[1]}
    scores = [upright[f"{name}, no rotations in training"] for name in ("timm ResNet", "p4_cnn")]
    assert "the ResNet has {} % accuracy, p4_cnn {} %".format(*scores) in section
    for name, images in (("EuroSAT", "16,200 satellite tiles"), ("Chula RBC-12", "10,184 blood cells")):
        augmented, plain = (" | ".join(_leads(name, "accuracy", 0, arm=arm)) for arm in ("augmented", "not augmented"))
        assert (
            f"| {name}, 1 to 100 % of {images} | rotated, reflected | {augmented} | | | as they are | {plain} |"
            in section
        )
    assert f"With all images and the same minutes the difference is {_with_all_images()}" in section
    assert "are {:+.1f}, {:+.1f} and {:+.1f}.".format(*_by_seed("chula_rbc12", 1)["steps"]) in section
    augmented, plain = (_leads("Chula RBC-12", "macro F1", 0, arm=arm)[1:] for arm in ("augmented", "not augmented"))
    said = f"by {augmented[0]}, against averaged copies by {augmented[1]}"
    assert f"{said} (trained on images as they are, by {plain[0]} and {plain[1]})" in section
    few, *more = (float(x) for x in _row("Chula RBC-12 from weights of EuroSAT", "accuracy", 2))
    assert few > 0 > max(more)
    assert f"it is {few} points more accurate than `z2_resnet29` on 1 % of the cells" in section
    assert f"and {-max(more)} to {-min(more)} less on 3 to 100 %" in section
    few, *more = (float(x) for x in _row("EuroSAT with p4m_resnet29", "accuracy", 2))
    assert f"on the tiles the difference is {few:+} on 1 % of them and {min(more)} to {max(more)} on more" in section
    headline = " ".join(text.partition("## Try it")[0].split())
    assert f"that of the macro F1 on the cells (the mean F1 of the classes) {augmented[1]}" in headline
    for line, words in ((0, "percentage points more accurate"), (2, "after the same minutes")):
        leads = [float(x) for name in ("EuroSAT", "Chula RBC-12") for x in _row(name, "accuracy", line)]
        assert min(leads) > 0
        assert f"{min(leads)} to {max(leads)} {words}" in headline
    averaged = [float(x) for name in ("EuroSAT", "Chula RBC-12") for x in _row(name, "accuracy", 3)]
    assert (
        f"against it the difference is {min(averaged):+} to {max(averaged):+} points after the same minutes" in headline
    )


def test_the_choice_says_whether_it_pays():
    """Its table is that of the study, and the text beside it too."""
    choice = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    names = ("EuroSAT", "Chula RBC-12", "EuroSAT with p4m_resnet29", "Chula RBC-12 from weights of EuroSAT")
    found = {
        (name, score): [_leads(name, score, 0, arm=arm) for arm in ("augmented", "not augmented")]
        for name in names
        for score in (("accuracy",) if name.startswith("EuroSAT") else ("accuracy", "macro F1"))
    }
    tiles, cells, rare = (
        found[key] for key in ((names[0], "accuracy"), (names[1], "accuracy"), (names[1], "macro F1"))
    )
    rows = [f"{' | '.join(column[line] for column in (*tiles, *cells))} |" for line in range(3)]
    rows += [f"| | | {' | '.join(column[line] for column in rare)} |" for line in range(3)]
    of_p4m = (*found[names[2], "accuracy"], *found[names[3], "accuracy"])
    rows += [f"{' | '.join(column[line] for column in of_p4m)} |" for line in range(3)]
    rows += [f"| | | {' | '.join(column[line] for column in found[names[3], 'macro F1'])} |" for line in range(3)]
    table = choice.partition("| | tiles, rotated |")[2].partition(" Averaging 8 copies")[0]
    places = [table.find(row) for row in rows]
    assert -1 not in places
    assert places == sorted(places)
    assert f"(plain: {_times_the_steps_of_p4m()} times the steps)" in table
    few, *more = (float(x) for x in _row(names[3], "accuracy", 2))
    assert few > 0 > max(more)
    few, *more = (float(x) for x in _row(names[2], "accuracy", 2))
    assert few > 0 > max(more)
    assert "`p4m_resnet29`, rotated, is more accurate than the plain network only where 1 % of the" in choice
    averaged = [float(x) for x in _row(names[2], "accuracy", 3)]
    assert max(averaged) < 0
    assert f"against 8 averaged copies it is {-max(averaged)} to {-min(averaged)} points less accurate on the" in choice
    alone, copies = ([-float(x) for x in _row(names[1], "macro F1", line)[2:4]] for line in (2, 3))
    said = f"by {min(alone)} to {max(alone)} points, with averaging by {min(copies)} to {max(copies)} (rotated"
    assert f"its macro F1 is higher on 10 and 30 % of the images, {said}" in choice
    by_seed = _by_seed("chula_rbc12", 1)["steps"]
    assert "are {:+.1f}, {:+.1f} and {:+.1f} after the same steps".format(*by_seed) in choice
    assert f"With all images and the same minutes the difference of `p4_resnet29` is {_with_all_images()}" in choice
    assert len({*_best("EuroSAT, 32", "accuracy"), "97.0"}) == 1
    (p4_best, plain_best), (p4_f1, plain_f1) = (_best("Chula RBC-12, 40", score) for score in ("accuracy", "macro F1"))
    assert f"has {plain_best} % accuracy and a macro F1 of {plain_f1} % on the cells" in choice
    assert f"the best of `p4_resnet29` {p4_best} and {p4_f1} %; on the tiles both have 97.0 %" in choice
    page = (ROOT / "docs" / "real_images.md").read_text()
    lines = [line.split("|") for line in page.splitlines() if line.startswith("| z2_resnet29, augmented, same steps |")]
    *_, cells, _, again, _ = (line[4].strip() for line in lines)  # at 10 %: accuracy, and macro F1 of the cells
    assert f"`z2_resnet29` has {cells} accuracy on 10 % of the cells after the same steps" in choice
    assert f"from those of EuroSAT {again};" in choice
    longer = re.search(r"took (\S+ to \S+) % longer", " ".join(page.split()))[1]
    assert f"took {longer} % longer" in choice


def _with_all_images() -> str:
    """The differences of p4_resnet29 with all images after the same minutes, on both sets, augmented and not."""
    sets, arms = ("EuroSAT", "Chula RBC-12"), ("augmented", "not augmented")
    single, averaged = ([float(_row(s, "accuracy", line, arm)[-1]) for s in sets for arm in arms] for line in (2, 3))
    return f"{min(single):+} to {max(single):+} points, and {min(averaged):+} to {max(averaged):+} against 8 averaged"


def _times_the_steps_of_p4m():
    page = (ROOT / "docs" / "real_images.md").read_text()
    return re.search(r"([\d.]+ to [\d.]+) times for p4m_resnet29", " ".join(page.split()))[1]


def _best(data: str, score: str, without: str = "none") -> list[str]:
    """The highest scores with all training images, of p4_resnet29 and of z2_resnet29, in docs/real_images.md."""
    page = (ROOT / "docs" / "real_images.md").read_text().partition(f"\n## {data}")[2]
    rows = page.partition(f"| {score} |")[2].partition("\n\n")[0].splitlines()
    found = []
    for network in ("p4_resnet29", "z2_resnet29"):
        scores = [
            row.split("|")[-2].split()[0] for row in rows if row.startswith(f"| {network}") and without not in row
        ]
        found.append(max(scores, key=float))
    return found


def _row(data: str, score: str, line: int, arm: str = "augmented") -> list[str]:
    """A line of the differences that docs/real_images.md prints, by the share of the training images."""
    page = (ROOT / "docs" / "real_images.md").read_text().partition(f"\n## {data}")[2]
    lines = page.partition(f"Differences of {score} ")[2].splitlines()
    cells = [row for row in lines if row.startswith(f"| both {arm}")][line].split("|")[2:-1]
    return [cell.partition("±")[0].strip() for cell in cells]  # the mean


def _by_seed(data: str, percent: int) -> dict[str, list[float]]:
    """The differences of accuracy of augmented networks for each seed, by the budget of the plain one."""
    runs = json.loads((ROOT / "docs" / "real_images.json").read_text())["runs"]
    kept = [run for run in runs if (run["data"], run["percent"], run["augment"]) == (data, percent, "affine")]
    found = {(run["network"], run["budget"], run["seed"]): run["accuracy"] for run in kept}
    seeds = sorted({run["seed"] for run in kept})
    return {
        budget: [round(found["p4_resnet29", "steps", s] - found["z2_resnet29", budget, s], 1) for s in seeds]
        for budget in ("steps", "minutes")
    }


def _leads(data: str, score: str, first: int, last: int | None = None, arm: str = "augmented") -> list[str]:
    """The lowest to the highest difference: same steps, same minutes, same minutes and 8 copies averaged."""
    rows = [sorted(_row(data, score, line, arm)[first:last], key=float) for line in (0, 2, 3)]
    return [row[0] if row[0] == row[-1] else f"{row[0]} to {row[-1]}" for row in rows]


def test_errors_beside_recipes_are_those_of_the_checkpoints():
    page = (ROOT / "docs" / "results.md").read_text().partition("## CIFAR-10 by recipe")[2]
    choice = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    table = page.partition("| network | training | validation error | test error |")[2].partition("\n\n")[0]
    means = {}
    for name in ("z2_resnet29", "p4_resnet29", "p4_se_resnet29", "p4m_resnet29", "p4_asc_resnet29", "p4m_asc_resnet29"):
        results = json.loads((ROOT / "model_cards" / f"{name}.cifar10" / "results.json").read_text())
        means[name] = np.mean(results["test_errors"])
        spread = f" ± {results['test_error_std']:.2f}" if results["seeds"] > 1 else ""
        row = re.search(rf"^\| `{name}`.* \| (.*) \| (.*) \|$", table, re.MULTILINE)
        assert row[2] == f"{means[name]:.2f}{spread}", name
        assert len(row[1].split(", ")) == results["seeds"], name
        assert f"{results['valid_error']:.2f}" == min(row[1].split(", ")), name
    for name in ("p4_resnet29", "p4m_resnet29", "p4_asc_resnet29", "p4m_asc_resnet29", "p4_allcnn"):
        (path,) = (ROOT / "model_cards").glob(f"{name}.cifar10*")
        results = json.loads((path / "results.json").read_text())
        spread = f" ± {results['test_error_std']:.2f}" if results.get("test_error_std") else ""
        (row,) = re.findall(rf"\| `{name}` \| 3 x 32 x 32 \|[^|]*\|[^|]*\|[^|]*\|[^|]*\|([^|]*)\|", choice)
        assert f"; {np.mean(results['test_errors']):.2f}{spread} %" in row, name
    for name, data in [
        *((name, "rotmnist") for name in ("p4_cnn", "p4m_cnn", "p4_alpha_f_cnn", "p4_cnn_w19", "p4_e4net")),
        ("p4_e4_resnet18", "cifar10"),
    ]:
        results = json.loads((ROOT / "model_cards" / f"{name}.{data}" / "results.json").read_text())
        (row,) = re.findall(rf"\| `{name}` \| [\dx ]+ \|[^|]*\|[^|]*\|[^|]*\|[^|]*\|([^|]*)\|", choice)
        assert f"{results['test_error']:.2f} %" in row, name
    p4m, p4 = (means[name] - means["z2_resnet29"] for name in ("p4m_resnet29", "p4_resnet29"))
    assert f"`p4m_resnet29` has {-p4m:.2f} points less test error than its plain network, at nine times" in choice
    assert f"and `p4_resnet29` {p4:.2f} points more; both may be chance" in choice
    assert f"where `p4_resnet29` has {means['p4_resnet29']:.2f} %" in choice
    assert f"where `p4_resnet29` has {means['p4_resnet29']:.2f} % (mean of two seeds" in " ".join(page.split())


def test_errors_of_the_weights_to_start_from_are_those_of_the_checkpoints():
    page = (ROOT / "docs" / "choosing.md").read_text()
    rows = re.findall(r"^\| `(\w+\.(?:eurosat|chula_rbc12))`.*$", page, re.MULTILINE)
    assert len(rows) == 7
    for name in rows:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}`"))
        results = json.loads((ROOT / "model_cards" / name / "results.json").read_text())
        errors = results["test_errors"]
        spread = f" ± {results['test_error_std']:.2f}" if len(errors) > 1 else ""
        assert f"| {np.mean(errors):.2f}{spread} %" in row, name
        if "these" in row or "weights here" in row:
            assert f"here {results['test_error']:.2f})" in row, name
        if name.endswith("chula_rbc12"):
            epochs = f"{results['recipe']['epochs']} ({results['selected_epoch']})"
            assert f"| {results['macro_f1']:.1f} % | {results['multiply_adds'] / 1e6:.0f} M | {epochs}" in row, name


def test_numbers_of_the_choice_are_those_of_the_networks_and_the_benchmark():
    page = (ROOT / "docs" / "choosing.md").read_text()
    bench = json.loads((ROOT / "docs" / "benchmarks" / "avx2" / "choosing_cpu.json").read_text())
    timed = {
        row["network"]: (1e3 * row["seconds"] / row["batch"], row["ratio"] or 0)
        for row in bench["rows"]
        if row["form"] == "eager"
    }
    more = json.loads((ROOT / "docs" / "benchmarks" / "choosing_avx512_cpu.json").read_text())["rows"]
    found = {row["network"]: 1e3 * row["seconds"] / row["batch"] for row in more if row["form"] == "eager"}
    assert f"in {found['p4_e4net_large'] / found['p4_cnn']:.1f} times the time of `p4_cnn`" in page
    ratio = found["p4m_densenet"] / found["z2_densenet"]
    assert f"in {found['p4m_densenet']:.0f} ms, {ratio:.1f} times the time of the plain `z2_densenet`" in page
    rows = re.findall(r"^\| `(\w+)` \| ([\d x]+) \| ([\d,]+) \| ([\d,]+) M \| ([\d.]*) \| ([\d.]*) \|", page, re.M)
    assert len(rows) > 10
    for name, size, parameters, multiply_adds, milliseconds, ratio in rows:
        model = weightless(name)
        assert tuple(map(int, size.split(" x "))) == model.input_size
        assert int(parameters.replace(",", "")) == sum(parameter.numel() for parameter in model.parameters()), name
        assert int(multiply_adds.replace(",", "")) == round(eqzoo.multiply_adds(model) / 1e6), name
        taken, expected = timed.get(name, (0, 0))
        assert float(milliseconds or 0) == pytest.approx(taken, abs=0.006 if taken < 10 else 0.06), name
        assert float(ratio or 0) == pytest.approx(expected, abs=0.06), name


@pytest.mark.parametrize("group", [eqzoo.P4, eqzoo.P4M], ids=lambda group: group.name)
def test_filters_of_groupy_become_ours(group):
    """The page's function, against GrouPy's law: copies by (m, r) ↦ M^m R^r with M the reflection of the rows."""
    namespace = {"torch": torch, "GroupConv2d": GroupConv2d, "eqzoo": eqzoo}
    page = (ROOT / "docs" / "migration.md").read_text()
    (block,) = (block for block in doc_pages.blocks(page) if "def from_groupy" in block.text)
    exec(block.text, namespace)
    rotation, rows = np.array([[0, -1], [1, 0]]), np.diag([-1, 1])
    elements = [
        np.linalg.matrix_power(rows, i // 4) @ np.linalg.matrix_power(rotation, i % 4) for i in range(group.order)
    ]
    weight, x = torch.randn(2, 3, group.order, 3, 3), torch.randn(1, 3, group.order, 7, 7)
    copies = torch.empty(2, group.order, *weight.shape[1:])
    for i, j, u, v in itertools.product(range(group.order), range(group.order), (-1, 0, 1), (-1, 0, 1)):
        back = np.rint(np.linalg.inv(elements[i])).astype(int)
        pose = next(k for k, element in enumerate(elements) if (element == back @ elements[j]).all())
        row, column = back @ (u, v)
        copies[:, i, :, j, u + 1, v + 1] = weight[:, :, pose, row + 1, column + 1]
    order = torch.tensor(foreign_elements(group)).argsort()
    y = torch.nn.functional.conv2d(x.flatten(1, 2), copies.reshape(2 * group.order, -1, 3, 3))
    layer = GroupConv2d(group, 3, 2, 3, bias=False)
    layer.load_state_dict({"weight": namespace["from_groupy"](weight, group)})
    torch.testing.assert_close(layer(x[:, :, order]), y.unflatten(1, (2, -1))[:, :, order])
    if group.reflections:  # control: reflected poses have another order
        layer.load_state_dict({"weight": weight.flatten(1, 2)})
        assert (layer(x[:, :, order]) - y.unflatten(1, (2, -1))[:, :, order]).abs().max() > 0.1
