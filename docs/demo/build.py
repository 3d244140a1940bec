"""Builds the page into dist/: the shipped networks as ONNX, ONNX Runtime from npm, all in files that need no server.

    python docs/demo/build.py

The runtime is fetched once, checked against the hash below and kept in vendor/. A browser may not fetch files beside a
page that it opened from a disk, so everything is in scripts: the WebAssembly zipped, and it and the networks in base64.
"""

import argparse
import base64
import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = ["index.html", "style.css", "image.js", "chart.js", "demo.js"]
CHECKPOINTS = {"p4_cnn": "p4_cnn.rotmnist", "z2_cnn": "z2_cnn.rotmnist"}
RUNTIME = "onnxruntime-web@1.30.0"
# What `npm view onnxruntime-web@1.30.0 dist.integrity` says.
RUNTIME_SHA512 = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
# What a static Space of the Hugging Face Hub wants beside the page; other hosts do not mind it.
SPACE = """---
title: Rotate the digit
emoji: 🔄
colorFrom: blue
colorTo: yellow
sdk: static
pinned: false
license: mit
---

An equivariant network and a plain one classify the digit that you draw, at every angle.
"""
# The part of the runtime without a GPU, as a classic script, what loads its WebAssembly, and that.
SCRIPT, LOADER, WASM = "ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"


def main() -> int:
    """Builds the page; returns 0, or 2 if the runtime cannot be fetched."""
    parser = argparse.ArgumentParser(description="Builds the page into a folder that any static host serves.")
    parser.add_argument("--output", type=Path, default=HERE / "dist", help="the folder (default: docs/demo/dist)")
    output = parser.parse_args().output
    vendor = HERE / "vendor" / RUNTIME
    if not vendor.is_dir():
        try:
            fetch_runtime(vendor)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"build.py: {RUNTIME} cannot be fetched with npm: {error}", file=sys.stderr)
            return 2
    output.mkdir(parents=True, exist_ok=True)
    for name in PAGE:
        shutil.copy(HERE / name, output)
    shutil.copy(vendor / SCRIPT, output / "runtime.js")
    wasm = gzip.compress((vendor / WASM).read_bytes(), mtime=0)
    write(output / "wasm.js", EQZOO_WASM=text(wasm), EQZOO_LOADER=(vendor / LOADER).read_text())
    write(output / "models.js", EQZOO_MODELS={name: network(checkpoint) for name, checkpoint in CHECKPOINTS.items()})
    (output / "README.md").write_text(SPACE)
    size = sum(path.stat().st_size for path in output.iterdir())
    print(f"wrote {output / 'index.html'}; the folder has {size / 1e6:.1f} MB")
    return 0


def fetch_runtime(vendor: Path) -> None:
    """Has npm fetch the runtime's package and keeps three of its files, whole or not at all."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    vendor.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=vendor.parent) as folder:
        # Without retries, a machine that is offline knows it at once.
        command = [npm, "pack", RUNTIME, "--silent", "--fetch-retries=0", "--pack-destination", folder]
        subprocess.run(command, check=True, capture_output=True, timeout=300, cwd=folder)
        (package,) = Path(folder).glob("*.tgz")
        if base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode() != RUNTIME_SHA512:
            raise OSError(f"{package.name} is not the file that was expected")
        kept = Path(folder) / "kept"
        kept.mkdir()
        with tarfile.open(package) as archive:
            for name in (SCRIPT, LOADER, WASM):
                member = archive.extractfile(f"package/dist/{name}")
                assert member is not None
                (kept / name).write_bytes(member.read())
        kept.rename(vendor)


def network(checkpoint: str) -> dict[str, object]:
    """A shipped network as ONNX, and what its file says of it."""
    import eqzoo
    from eqzoo.hub import shipped_folder

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        report = eqzoo.export_onnx(eqzoo.create_model(checkpoint, pretrained=True), path)
        results = json.loads((shipped_folder() / checkpoint / "results.json").read_text())
        about = {"metadata": report.metadata, "error": results["test_error"]}
        return {"onnx": text(path.read_bytes()), **about}


def text(data: bytes) -> str:
    """Bytes as letters."""
    return base64.b64encode(data).decode()


def write(path: Path, **values: object) -> None:
    """Writes a script that sets global names."""
    path.write_text("".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items()))


if __name__ == "__main__":
    sys.exit(main())
