"""Writes a network, ONNX Runtime Web and a web page into one HTML file."""

import base64
import gzip
import html
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .._common import write_text
from ..cards.checkpoint import CARD_NAME
from ..data.folder import LEFT_BEHIND, composed
from ..data.images import MODES
from ..evaluation.notes import BRIGHTNESS
from ..evaluation.predictor import load_predictor
from ..evaluation.thresholds import check_thresholds
from ..export.onnx_network import OnnxNetwork
from ..export.programs import export_onnx, target, weights_sha256
from ..groups import P4M
from ..hub import CONFIG_NAME, RESULTS_NAME, fetch_npm, shipped_folder
from ..models.load import load_network

# Packages of npm and the SHA-256 of their archives. UTIF reads TIFF files; pako inflates them and gray PNG of 16 bits.
_RUNTIME = ("onnxruntime-web", "1.30.0", "d2228df7e4616bc3348bf504ee888f3bec43789a273f0a63f3e68d203ce3bf71")
_INFLATE = ("pako", "1.0.11", "0d4028dc0352a740c30cbfd772917f2744986d42bfa0b06ec7642bffe7ad3941")
_TIFF = ("utif2", "4.1.0", "4156ccd1164f1418af3632b40f0e7992d47a9a622956e85b00b8c605065e8e35")


def write_page(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    thresholds: Mapping[str, float] | None = None,
    title: str | None = None,
    introduction: str = "",
    extra: str = "",
) -> list[str]:
    """Writes a web page that classifies images with a network: one file that needs no server and no installation.

    The page runs the ONNX file of the network in ONNX Runtime Web, which is downloaded once from the npm registry. Its
    content security policy forbids every connection, so that images stay in the browser. Pixels are those of
    `eqzoo.data.preprocess` and `eqzoo.rotate`.

    Args:
        source: A checkpoint, as `eqzoo.create_model` takes it as a name, or an .onnx file that `eqzoo.export_onnx` or
            `eqzoo.quantize_onnx` wrote.
        path: The file to write, ``*.html``; an existing one is replaced.
        against: A network of the same classes whose predictions are shown beside, such as a plain one.
        thresholds: Probabilities by class, from which on a class is predicted; they can be changed in the page.
        title: The heading; by default the name of the network.
        introduction: HTML below the heading.
        extra: HTML of a section before the others; its scripts may call the functions of ``page.js``.

    Returns:
        The names of the networks in the page.

    Raises:
        ValueError: If the path has another suffix, a network does not classify images of 1, 3 or 4 channels, the two
            have different classes, or a threshold is of no class.
        OSError: If ONNX Runtime Web cannot be downloaded, or the file cannot be written.
    """
    page = target(Path(path), ".html")
    found = [_network(each) for each in (source, against) if each is not None]
    networks = [network for network, _, _ in found]
    name, classes = networks[0]["name"], networks[0]["classes"]
    if len({network["name"] for network in networks}) < len(networks):
        networks = [network | {"name": f"{name} ({number})"} for number, network in enumerate(networks, 1)]
    if len(classes) < 2 or any(each["classes"] != classes or each["size"][0] not in MODES for each in networks):
        got = " and ".join(f"{each['name']} of {each['classes']} with images {each['size']}" for each in networks)
        raise ValueError(
            f"a page is of networks of the same two or more classes, for images of 1, 3 or 4 channels; got {got}"
        )
    check_thresholds(thresholds or {}, classes, name, choosing=True)
    limits = {composed(key): value for key, value in (thresholds or {}).items()}
    config = {
        "networks": networks,
        "thresholds": {label: limits[composed(label)] for label in classes if composed(label) in limits},
        "ignored": sorted(LEFT_BEHIND),
        "brightness": BRIGHTNESS,
    }
    runtime = _files(_RUNTIME, "ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
    libraries = [*_files(_INFLATE, "pako_inflate.min.js"), *_files(_TIFF, "UTIF.js"), runtime[0]]
    names = ("page.html", "style.css", "pixels.js", "worker.js", "chart.js", "page.js")
    own = {file: (Path(__file__).parent / file).read_text(encoding="utf-8") for file in names}
    parts = {
        "title": html.escape(title or name),
        "introduction": introduction,
        "extra": extra,
        "about": found[0][2],
        "style": own["style.css"],
        "config": json.dumps(config).replace("<", "\\u003c"),
        "wasm": _packed(runtime[2]),
        "loader": _script(runtime[1].decode()),
        "networks": "\n".join(
            f'<script type="text/plain" id="network-{i}">{_packed(onnx)}</script>'
            for i, (_, onnx, _) in enumerate(found)
        ),
        "worker": _script("\n;\n".join([*map(bytes.decode, libraries), own["pixels.js"], own["worker.js"]])),
        "script": _script(own["chart.js"] + own["page.js"]),
    }
    write_text(page, re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], own["page.html"]))
    return [network["name"] for network in networks]


def _network(source: str | os.PathLike[str]) -> tuple[dict[str, Any], bytes, str]:
    """What the page has to know of a network, its ONNX file, and a description in HTML."""
    loaded = load_predictor(source, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "network.onnx"
        if isinstance(loaded.network, OnnxNetwork):
            network, file = loaded.network, loaded.network.path
        else:
            export_onnx(loaded.network, file)
            network = OnnxNetwork(file)
        onnx = file.read_bytes()
    cfg, exact = network.pretrained_cfg, network.group.of_grid
    if exact.order == 1:  # a plain network is shown under all symmetries of the grid
        exact = P4M
    entry = {
        "name": Path(loaded.title).name or Path(source).resolve().name,
        "classes": list(cfg["label_names"]) or [str(i) for i in range(network.num_classes)],
        "size": list(network.input_size),
        "mean": list(cfg["mean"]),
        "std": list(cfg["std"]),
        "rotations": exact.rotations,
        "reflections": exact.reflections,
    }
    rows = {"network": f"{cfg['architecture']}, equivariance group {network.group.name}"}
    folders = [loaded.folder or shipped_folder() / loaded.title]
    if network is loaded.network:  # a file that was made of the checkpoint beside it, or of one of this package
        folders = [file.parent, shipped_folder() / f"{cfg['architecture']}.{cfg['tag']}"]
        folders = [each for each in folders if _sha256_in(each) == network.metadata.get("weights_sha256", "")]
    rows |= dict(_described(folders[0])) if folders else {}
    if "accuracy" in rows and "quantized" in network.metadata:
        rows["accuracy"] += " (in float32, before quantization)"
    rows["images"] = " x ".join(map(str, network.input_size)) + " (channels, height, width)"
    text = "".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd>" for key, value in rows.items())
    return entry, onnx, f"<dl>{text}</dl>"


def _sha256_in(folder: Path) -> str | None:
    """The SHA-256 of the weights in a folder, as ONNX files hold it; None without a checkpoint."""
    if not (folder / CONFIG_NAME).is_file():
        return None
    try:
        return weights_sha256(load_network(f"local-dir:{folder}").network)
    except (OSError, ValueError, RuntimeError):  # the folder of something else
        return None


def _described(folder: Path) -> Iterator[tuple[str, str]]:
    """What a checkpoint's folder says of its training, accuracy, use and license, as far as it says so."""
    texts = {
        name: file.read_text(encoding="utf-8") if (file := folder / name).is_file() else ""
        for name in (RESULTS_NAME, CONFIG_NAME, CARD_NAME)
    }
    results, config = (json.loads(texts[name] or "{}") for name in (RESULTS_NAME, CONFIG_NAME))
    card = texts[CARD_NAME]
    if opening := re.search(r"^# .*\n+((?:[^\n#].*\n)+)", card, re.MULTILINE):
        yield "training", _plain(opening[1])
    if "accuracy" in results:
        split = results["evaluated_on"]
        low, high = results["accuracy_interval"]
        yield (
            "accuracy",
            f"{results['accuracy']:.2f} % on {results['images'][split]:,} images of the {split} split "
            f"(95 % confidence interval {low:.1f} to {high:.1f} %)",
        )
    if limits := re.search(r"^## Limits.*\n+((?:[^\n#].*\n)+)", card, re.MULTILINE):
        yield "limits and intended use", _plain(limits[1])
    if given := (config.get("pretrained_cfg") or {}).get("license"):
        yield "license of the weights", str(given)


def _plain(markdown: str) -> str:
    """A paragraph of Markdown as plain text: without the addresses of links and the marks of code."""
    return " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown).replace("`", "").split())


def _files(package: tuple[str, str, str], *names: str) -> list[bytes]:
    """Files of a package of npm, from its folder ``dist`` or its root."""
    found = []
    with tarfile.open(fetch_npm(*package)) as archive:
        members = {member.name: member for member in archive}
        for name in names:
            file = archive.extractfile(members.get(f"package/dist/{name}") or members[f"package/{name}"])
            assert file is not None
            found.append(file.read())
    return found


def _packed(data: bytes) -> str:
    """Bytes for a page: zipped, then in base64."""
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()


def _script(text: str) -> str:
    """A script that does not end the element that it stands in."""
    return text.replace("</script", r"<\/script").replace("<!--", r"<\!--")
