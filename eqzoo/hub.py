"""Weights: the user's folders, the checkpoints shipped with the package, the Hugging Face Hub; packages of npm.

**What a download is checked against.** huggingface_hub compares the size of a download, not its content, so every file
from the Hub, a cached one too, is hashed here (SHA-256) before it is loaded, and compared with

* for a checkpoint of this package, the hash in the ``results.json`` that the package ships, which does not come from
  the server, so that a changed repo is noticed;
* for ``hf-hub:<owner>/<repo>``, the hash in the ``config.json`` of the same commit, where the repo states one;
* the name under which the Hub stores a large file, which is its hash.

A file that differs is removed from the cache, and is an error. Local files, in ``EQZOO_WEIGHTS`` or the folder of a
checkpoint, are not checked.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = [
    "CONFIG_NAME",
    "HUB_OWNER",
    "RESULTS_NAME",
    "STATE_NAME",
    "WEIGHTS_NAME",
    "PushError",
    "WeightsNotFoundError",
    "base_model",
    "fetch_config",
    "fetch_npm",
    "fetch_weights",
    "find_weights",
    "published_names",
    "push",
    "read_config",
    "sha256_of",
    "shipped_folder",
    "user_folder",
]

HUB_OWNER = "eqzoo"
WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
RESULTS_NAME = "results.json"
STATE_NAME = "state.pt"  # of a training, until it has ended
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".npz", ".h5", ".msgpack")


class WeightsNotFoundError(FileNotFoundError):
    """No weights in any of the places that are searched; the message names them."""


class PushError(OSError):
    """Nothing was committed to the Hub; the message says why."""


def shipped_folder() -> Path:
    """The folder of shipped checkpoints: ``model_cards/`` in the installed package, or in the clone."""
    package = Path(__file__).resolve().parent
    installed = package / "model_cards"
    return installed if installed.is_dir() else package.parent / "model_cards"


def published_names() -> list[str]:
    """The published checkpoints: the folders of `shipped_folder` with a config.json, with or without weights."""
    return sorted(path.parent.name for path in shipped_folder().glob(f"*/{CONFIG_NAME}"))


def user_folder() -> Path | None:
    """The folder that the environment variable ``EQZOO_WEIGHTS`` names, or None if it is not set.

    Raises:
        ValueError: If it names no folder.
    """
    if not os.environ.get("EQZOO_WEIGHTS"):
        return None
    folder = Path(os.environ["EQZOO_WEIGHTS"]).expanduser()
    if not folder.is_dir():
        raise ValueError(f"EQZOO_WEIGHTS names {folder}, which is no folder; correct it or unset it")
    return folder


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_weights(name: str, repo_id: str | None, cache_dir: str | Path | None = None) -> Path:
    """Finds the weights of a checkpoint, in this order: ``EQZOO_WEIGHTS``, the shipped checkpoints, the Hub.

    A folder of checkpoints holds ``<name>/model.safetensors``, as a Hub repo, or ``<name>.safetensors``. An installed
    package ships the weights of up to 2 MB, a clone all that are published.

    Args:
        name: The checkpoint, ``<model>.<data set>``.
        repo_id: Its Hub repo, ``<owner>/<name>``, or None if it has not been published.
        cache_dir: Where downloads are kept; by default huggingface_hub's own cache.

    Returns:
        The path of a safetensors file.

    Raises:
        WeightsNotFoundError: If it is in none of the three places, or the Hub cannot be reached.
        ValueError: If the Hub gave a file that is not the checkpoint this package was released with, or
            ``EQZOO_WEIGHTS`` names no folder.

    Example:
        >>> find_weights("p4_cnn.rotmnist", "eqzoo/p4_cnn.rotmnist").name
        'model.safetensors'
    """
    for folder in filter(None, (user_folder(), shipped_folder())):
        for path in (folder / name / WEIGHTS_NAME, folder / f"{name}.safetensors"):
            if path.is_file():
                return path
    reason = "it has not been published on the Hub"
    if repo_id is not None:
        results = shipped_folder() / name / RESULTS_NAME
        try:
            known = read_config(results).get("weights_sha256") if results.is_file() else None
            return fetch_weights(repo_id, cache_dir, known)
        except WeightsNotFoundError as error:
            reason = str(error)
    raise WeightsNotFoundError(
        f"no weights for {name}: not in EQZOO_WEIGHTS ({os.environ.get('EQZOO_WEIGHTS') or 'not set'}); not in "
        f"{shipped_folder()}, where an installed package has those of up to 2 MB and a clone all; and {reason}. To fix "
        "this: pass checkpoint_path=FILE.safetensors to eqzoo.create_model; set EQZOO_WEIGHTS to a folder that holds "
        f"{name}/{WEIGHTS_NAME}, such as model_cards of a clone; or, for a published checkpoint, go online"
    )


def base_model(name: str, repo_id: str | None) -> str | None:
    """The Hub repo of a checkpoint that a training starts from, ``<owner>/<repo>``, or None if it is in none.

    Args:
        name: The checkpoint, as `eqzoo.create_model` names it.
        repo_id: The Hub repo that the registry names for it.
    """
    source, _, place = name.partition(":")
    return None if source == "local-dir" else place.partition("@")[0] or repo_id


def fetch_weights(repo_id: str, cache_dir: str | Path | None = None, sha256: str | None = None) -> Path:
    """Downloads the weights of a Hub repo, or takes them from the cache, and checks their hash.

    Args:
        repo_id: ``<owner>/<repo>``, with ``@<revision>`` for another one than main.
        cache_dir: Where downloads are kept; by default huggingface_hub's own cache.
        sha256: The known hash of the file; by default that in the repo's config.json.

    Returns:
        The path of a safetensors file in the cache.

    Raises:
        WeightsNotFoundError: If the Hub does not have it or cannot be reached; the message says why.
        ValueError: If its hash is wrong; it is then removed from the cache.
    """
    from huggingface_hub.errors import EntryNotFoundError

    path = _download(repo_id, WEIGHTS_NAME, cache_dir)
    if sha256 is None:
        # The folder of a cached file is named for its commit, from which the config.json is taken too: from the cache
        # if it is there. A repo without config.json states no hash.
        commit = f"{repo_id.partition('@')[0]}@{path.parent.name}"
        try:
            sha256 = (fetch_config(commit, cache_dir).get("eqzoo") or {}).get("weights_sha256")
        except WeightsNotFoundError as error:
            if not isinstance(error.__cause__, EntryNotFoundError):
                raise
    known = {str(sha256).lower()} if sha256 else set()
    if re.fullmatch("[0-9a-f]{64}", stored := path.resolve().name):
        known.add(stored)
    found = sha256_of(path)
    if known - {found}:
        with suppress(OSError):  # of a cache that must not be written; the next load finds the same
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        raise ValueError(
            f"{WEIGHTS_NAME} of {repo_id} has sha256 {found}, and should have {' and '.join(sorted(known))}: it was "
            f"damaged on the way, or the repo's weights were changed without its {CONFIG_NAME}. Remove {path} if it is "
            "still there, and try again; install the newest eqzoo, or take another revision, <owner>/<repo>@<revision>"
        )
    return path


def fetch_npm(package: str, version: str, sha256: str) -> Path:
    """The archive of a package of the npm registry, downloaded once into torch.hub's folder and checked by its hash.

    Args:
        package: Its name, without a scope.
        version: Its version.
        sha256: The SHA-256 of the archive.

    Returns:
        The path of a .tgz file.

    Raises:
        OSError: If the registry (``NPM_CONFIG_REGISTRY``) does not give the file, or gives another one.
    """
    import torch

    path = Path(torch.hub.get_dir()) / "npm" / f"{package}-{version}.tgz"
    if path.is_file() and sha256_of(path) == sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    registry = os.environ.get("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org").rstrip("/")
    url = f"{registry}/{package}/-/{path.name}"
    try:
        torch.hub.download_url_to_file(url, str(path), sha256)
    except (OSError, RuntimeError) as error:
        raise OSError(f"{url} is not downloaded: {error}") from error
    return path


def fetch_config(repo_id: str, cache_dir: str | Path | None = None) -> dict[str, Any]:
    """The config.json of a Hub repo, ``<owner>/<repo>[@<revision>]``.

    Raises:
        WeightsNotFoundError: If the Hub does not give it; the message says why.
        ValueError: If it is not JSON.
    """
    return read_config(_download(repo_id, CONFIG_NAME, cache_dir))


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json.

    Raises:
        OSError: If there is no such file.
        ValueError: If it is not JSON.
    """
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    return config


def push(
    files: Mapping[str, Path | bytes], repo_id: str, message: str, replace: bool = False, private: bool = False
) -> list[str]:
    """Uploads the files that differ from those of a Hub repo, in one commit; creates the repo if it does not exist.

    A commit is atomic: a failed upload leaves the repo unchanged, or new and empty.

    Args:
        files: The files by their names in the repo, the weights among them.
        repo_id: ``<owner>/<repo>``.
        message: The first line of the commit.
        replace: Whether other weights in the repo may be replaced; weights in files of other names are then removed.
            An ONNX file beside the same ``model.safetensors`` is not other weights: it is replaced or stays.
        private: Whether a repo that does not exist yet is created as a private one; one that exists stays what it is.

    Returns:
        The names of the files that were uploaded or removed; none if the repo is up to date.

    Raises:
        PushError: If nobody is logged in, the repo holds other weights, or the Hub refuses or cannot be reached.
    """
    # Imported here and below when it is needed: importing it takes a second.
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    weights = files[WEIGHTS_NAME]
    assert isinstance(weights, Path)
    api = HfApi(token=True)  # an error without a login
    try:
        commit, there = _contents(api, repo_id)
        others = [name for name in there if name.endswith(_WEIGHT_SUFFIXES)]
        if there.get(WEIGHTS_NAME) == sha256_of(weights):
            # A file that is made of the same weights may be other bytes, or not be here: it is not in the way.
            others = [name for name in others if name != WEIGHTS_NAME and not name.endswith(".onnx")]
        if others and not replace:
            raise PushError(
                f"{repo_id} holds other weights ({', '.join(sorted(others))}); --replace puts these in their place, or "
                "push to another owner"
            )
        if commit is None:
            api.create_repo(repo_id, exist_ok=True, private=private or None)
        add = [CommitOperationAdd(name, data if isinstance(data, bytes) else str(data)) for name, data in files.items()]
        remove = [CommitOperationDelete(name) for name in others if name not in files]
        api.create_commit(repo_id, [*add, *remove], commit_message=message, parent_commit=commit)
        _, now = _contents(api, repo_id)
    except PushError:
        raise
    except Exception as error:  # every version of huggingface_hub raises its HTTP library's own errors here
        raise PushError(f"nothing was committed to {repo_id}: {' '.join(str(error).split())}") from error
    return sorted(name for name in {*files, *others} if there.get(name) != now.get(name))


def _contents(api: Any, repo_id: str) -> tuple[str | None, dict[str, str]]:
    """The last commit of a repo and the hashes of its files by name: SHA-256 of large files, else git's.

    None and an empty mapping if there is no such repo.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.model_info(repo_id, files_metadata=True)
    except RepositoryNotFoundError:
        return None, {}
    return info.sha, {file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id for file in info.siblings or ()}


def _download(repo_id: str, filename: str, cache_dir: str | Path | None) -> Path:
    from huggingface_hub import hf_hub_download

    repo, _, revision = repo_id.partition("@")
    try:
        return Path(hf_hub_download(repo, filename, revision=revision or None, cache_dir=cache_dir))
    except Exception as error:  # as above
        raise WeightsNotFoundError(f"no {filename} from the Hub's {repo_id}: {' '.join(str(error).split())}") from error
