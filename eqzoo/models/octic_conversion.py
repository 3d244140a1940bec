"""Makes the released weights of octic vision transformers those of `eqzoo.models.OcticViT`.

The files are of DeiT III (the weights under ``model``) or DINOv2 (under ``teacher``, with the prefix ``backbone.``).
Sizes are read from the weights; the number of heads leaves no trace in them, and is that of the network's name or of
the caller.

The class token is released with all its parts, of which only A1 was trained. A file where another one is not zero was
changed by an optimizer that decays or moves frozen parameters: it is not invariant, and refused.

References:
    Octic Vision Transformers: Quicker ViTs Through Equivariance (Nordström, Edstedt, Kahl and Bökman, 2025)
    https://arxiv.org/abs/2505.15441, https://github.com/davnords/octic-vits
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from timm.data import ImageNetInfo
from torch import Tensor

from .._common import atomic, write_json
from ..hub import CONFIG_NAME, WEIGHTS_NAME, sha256_of
from ._released_files import read_pth, some_of
from .builder import configured_name, fits, per_channel
from .config import checkpoint_config
from .octic_vit import OcticViT

_IRREPS = ("A1", "A2", "B1", "B2", "E")
_LIFTED = "patch_embed.lift8.conv_A1.weight"
_LIFTING = ("A1", "A2", "B1", "B2", "E_left", "E_right")


def write_octic_vit(path: Path, model: str, output: Path, settings: Mapping[str, Any] | None = None) -> str:
    """Converts a file to a folder with model.safetensors and config.json; says how it is loaded.

    Args:
        path: The released file.
        model: The registered name.
        output: The folder to make.
        settings: Arguments that the file does not tell, such as ``num_heads``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is not of such a network, or is not invariant.
    """
    settings = settings or {}
    network, cfg, args = read_octic_vit(path, model, settings)
    output.mkdir(parents=True, exist_ok=True)
    weights = output / WEIGHTS_NAME
    atomic(weights, partial(save_file, network.float().state_dict(), metadata={"format": "pt"}))
    labels = ImageNetInfo("imagenet-1k").label_descriptions() if network.num_classes == 1000 else []
    about: dict[str, Any] = {"label_names": labels, "group": network.group.name, "weights_sha256": sha256_of(weights)}
    write_json(output / CONFIG_NAME, checkpoint_config(network, cfg, model_args=args, **about))
    heads = (
        "as set" if "num_heads" in settings else f"as {model.partition('.')[0]} has; another number: --set num_heads="
    )
    sizes = (
        f"width {args['embed_dim']}, {args['depth']} blocks, {args['num_heads']} heads ({heads}), patches of "
        f"{args['patch_size']} on {args['img_size']} pixels, {args['num_classes']} classes"
    )
    return f"wrote {output}: {sizes}; eqzoo.create_model('local-dir:{output}', pretrained=True) reads it"


def read_octic_vit(
    path: Path, model: str, settings: Mapping[str, Any]
) -> tuple[OcticViT, dict[str, Any], dict[str, Any]]:
    """The network of a released file, its configuration, and the arguments of its class; see `write_octic_vit`."""
    architecture = model.partition(".")[0]
    if "octic_vit" not in architecture or not timm.is_model(architecture):
        names = ", ".join(timm.list_models("*octic_vit*"))
        raise ValueError(f"released weights of octic_vits fit {names}; got {model!r}")
    theirs = _weights(path)
    with torch.device("meta"):
        named = timm.create_model(architecture)
    if _LIFTED not in theirs:
        raise ValueError(f"{path} is no file of an octic ViT, whose weights do not follow from a plain ViT's")
    invariant = "invariant_proj.weight" in theirs
    if invariant != (named.group.order > 1):
        kind, other = ("invariant", "p4m_octic_vit_*") if invariant else ("hybrid", "octic_vit_*")
        raise ValueError(f"{path} is of {'an' if invariant else 'a'} {kind} network, and {model} is not; name {other}")
    try:
        args = _sizes(theirs) | {"num_heads": named.blocks[0].attn.num_heads} | dict(settings)
        state = octic_vit_state(theirs, args["depth"])
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"{path} lacks weights of an octic ViT, or they have other sizes: {error}") from error
    with torch.device("meta"):
        network = OcticViT(**args, invariant=invariant)
    with fits(path, architecture):
        network.load_state_dict(state, assign=True)
    recipe = "deit3_in1k" if "head.weight" in theirs else "dinov2_in1k"
    cfg = timm.get_pretrained_cfg(configured_name(architecture, recipe)).to_dict(remove_source=True)
    channels, side = args["in_chans"], args["img_size"]
    cfg |= {"architecture": architecture, "tag": recipe, "num_classes": args["num_classes"], "license": "apache-2.0"}
    cfg |= {"input_size": (channels, side, side)} | {key: per_channel(cfg[key], channels) for key in ("mean", "std")}
    return network, cfg, args


def octic_vit_state(theirs: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    """The state dict of `OcticViT` from released weights without wrappers and prefixes.

    Args:
        theirs: The released weights.
        depth: The number of blocks.

    Raises:
        ValueError: If a frozen part of the class token is not zero, or a weight has no place.
        KeyError: If a weight is missing.
    """
    rest = dict(theirs)
    for name in [name for name in rest if name.startswith("mask_token.")]:
        del rest[name]  # of DINOv2's training, unused
    lifting = "patch_embed.lift8.conv"
    state = {
        "stem.patch.weight": torch.cat([rest.pop(f"{lifting}_{part}.weight") for part in _LIFTING]),
        "stem.patch.bias": rest.pop(f"{lifting}_A1.bias"),
        "stem.pos.weight": torch.stack([rest.pop(f"pos_embed.{i}") for i in range(6)]),
        "stem.class_token": rest.pop("cls_token.0"),
    }
    for name in [name for name in rest if name.startswith("cls_token.")]:
        if rest.pop(name).any():
            raise ValueError(
                f"{name}, a part of the class token that is frozen at zero, is not zero (up to "
                f"{theirs[name].abs().max():.1e}): the network is not invariant. Training with weight decay or without "
                "the freeze has moved it; take the file of another step, or set it to zero and train on"
            )
    for i in range(depth):
        state |= dict((_octic_block if i < depth // 2 else _plain_block)(rest, f"blocks.{i}"))
    if "invariant_proj.weight" in rest:
        state |= {f"middle.proj.{part}": rest.pop(f"invariant_proj.{part}") for part in ("weight", "bias")}
    for name in ("norm.weight", "norm.bias"):
        state[name] = rest.pop(name)
    if "head.weight" in rest:
        state |= {name: rest.pop(name) for name in ("head.weight", "head.bias")}
    if rest:
        raise ValueError(f"{len(rest)} weights have no place in an octic ViT of {depth} blocks: {some_of(rest)}")
    return {name: value.contiguous() for name, value in state.items()}


def _octic_block(rest: dict[str, Tensor], block: str) -> Iterator[tuple[str, Tensor]]:
    def alphas(name: str) -> Tensor:
        return torch.cat([rest.pop(f"{block}.{name}.alpha_{irrep}") for irrep in _IRREPS])

    for i in (1, 2):
        yield f"{block}.norm{i}.weight", alphas(f"norm{i}.scaling")
        yield f"{block}.norm{i}.bias", rest.pop(f"{block}.norm{i}.scaling.beta")
        scale = _scale(rest, block, i)
        if scale:
            yield f"{block}.ls{i}.weight", alphas(scale)
    for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
        theirs = f"{block}.{layer}.lin"
        yield f"{block}.{layer}.weight", torch.stack([rest.pop(f"{theirs}_{irrep}.weight").T for irrep in _IRREPS[:4]])
        yield f"{block}.{layer}.weight_e", rest.pop(f"{theirs}_E.weight")
        yield f"{block}.{layer}.bias", rest.pop(f"{theirs}_A1.bias")


def _plain_block(rest: dict[str, Tensor], block: str) -> Iterator[tuple[str, Tensor]]:
    for layer in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"):
        for part in ("weight", "bias"):
            yield f"{block}.{layer}.{part}", rest.pop(f"{block}.{layer}.{part}")
    for i in (1, 2):
        for name in (f"gamma_{i}", f"ls{i}.gamma"):
            if f"{block}.{name}" in rest:
                yield f"{block}.ls{i}.gamma", rest.pop(f"{block}.{name}")


def _scale(rest: Mapping[str, Tensor], block: str, i: int) -> str | None:
    """What layer scale is called: one way in files of DeiT III, another in those of DINOv2."""
    return next((name for name in (f"gamma_{i}", f"ls{i}") if f"{block}.{name}.alpha_A1" in rest), None)


def _sizes(theirs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The arguments of `OcticViT` that weights tell."""
    lifting = theirs[_LIFTED]
    width, patch = 8 * lifting.shape[0], 2 * lifting.shape[2]
    blocks = {int(name.split(".")[1]) for name in theirs if name.startswith("blocks.")}
    scaled = any(_scale(theirs, "blocks.0", i) for i in (1, 2))
    return {
        "num_classes": theirs["head.weight"].shape[0] if "head.weight" in theirs else 0,
        "in_chans": lifting.shape[1],
        "img_size": 2 * theirs["pos_embed.0"].shape[0] * patch,
        "patch_size": patch,
        "embed_dim": width,
        "depth": max(blocks, default=-1) + 1,
        "mlp_ratio": 8 * theirs["blocks.0.mlp.fc1.lin_A1.weight"].shape[0] / width,
        "init_values": 1e-4 if scaled else None,
    }


def _weights(path: Path) -> dict[str, Tensor]:
    """The weights of a file, without the wrappers and prefixes of either project."""
    held = read_pth(path)
    for wrapper in ("model", "teacher", "state_dict"):
        if isinstance(held.get(wrapper), dict):
            held = held[wrapper]
            break
    state = {str(name).removeprefix("module."): value for name, value in held.items()}
    if any(name.startswith("backbone.") for name in state):  # beside it are heads of DINOv2's training
        state = {name.removeprefix("backbone."): value for name, value in state.items() if name.startswith("backbone.")}
    return state
