"""Where weights come from: a folder of the user's, the checkpoints shipped with the package, the Hugging Face Hub."""

import os
from pathlib import Path

__all__ = ["HUB_OWNER", "WEIGHTS_NAME", "WeightsNotFoundError", "find_weights", "shipped_folder"]

HUB_OWNER = "eqzoo"
WEIGHTS_NAME = "model.safetensors"


class WeightsNotFoundError(FileNotFoundError):
    """No weights in any of the places where they are looked for; the message names the places."""


def shipped_folder() -> Path:
    """The folder of shipped checkpoints: ``model_cards/`` inside an installed package, else in the clone around it."""
    package = Path(__file__).resolve().parent
    installed = package / "model_cards"
    return installed if installed.is_dir() else package.parent / "model_cards"


def find_weights(name: str, repo_id: str | None, cache_dir: str | Path | None = None) -> Path:
    """Finds the weights of a checkpoint, in this order: ``EQZOO_WEIGHTS``, the shipped checkpoints, the Hub.

    A folder of checkpoints holds ``<name>/model.safetensors``, as a Hub repo, or ``<name>.safetensors``.

    Args:
        name: The checkpoint, ``<model>.<data set>``.
        repo_id: Its Hub repo, ``<owner>/<name>``, or None if it has not been published.
        cache_dir: Where downloads are kept; by default huggingface_hub's own cache.

    Returns:
        The path of a safetensors file.

    Raises:
        WeightsNotFoundError: If it is in none of the three places, the Hub cannot be reached, or ``EQZOO_WEIGHTS``
            names no folder.

    Example:
        >>> find_weights("p4_cnn.rotmnist", "eqzoo/p4_cnn.rotmnist").name
        'model.safetensors'
    """
    folders = [Path(os.environ["EQZOO_WEIGHTS"]).expanduser()] if os.environ.get("EQZOO_WEIGHTS") else []
    if folders and not folders[0].is_dir():
        raise WeightsNotFoundError(f"EQZOO_WEIGHTS names {folders[0]}, which is no folder; correct it or unset it")
    for folder in (*folders, shipped_folder()):
        for path in (folder / name / WEIGHTS_NAME, folder / f"{name}.safetensors"):
            if path.is_file():
                return path
    return _download(name, repo_id, cache_dir)


def _download(name: str, repo_id: str | None, cache_dir: str | Path | None) -> Path:
    if repo_id is None:
        raise WeightsNotFoundError(_nowhere(name, "it has not been published on the Hub"))
    from huggingface_hub import hf_hub_download  # imported late: it takes a second that local weights do not need

    try:
        return Path(hf_hub_download(repo_id, WEIGHTS_NAME, cache_dir=cache_dir))
    except Exception as error:  # every version of huggingface_hub raises its HTTP library's own errors here
        reason = f"the Hub gave no https://huggingface.co/{repo_id} ({type(error).__name__}: {error})"
        raise WeightsNotFoundError(_nowhere(name, reason)) from error


def _nowhere(name: str, reason: str) -> str:
    folder = os.environ.get("EQZOO_WEIGHTS")
    return (
        f"no weights for {name}: not in EQZOO_WEIGHTS ({folder or 'not set'}), not shipped in {shipped_folder()}, and "
        f"{reason}. Three ways on: pass checkpoint_path=FILE.safetensors to eqzoo.create_model; set EQZOO_WEIGHTS to a "
        f"folder that holds {name}/{WEIGHTS_NAME}; or, for a published checkpoint, go online"
    )
