"""The arguments of each command; the docstring of its function is its help.

Completion uses the metavars: NAME is a network or checkpoint, FILE a file, DIR a folder.
"""

import argparse
from collections.abc import Callable


def _list(sub: argparse.ArgumentParser) -> None:
    """Lists the networks, or the checkpoints that exist."""
    sub.add_argument("pattern", nargs="?", default="*", help="a shell pattern such as 'p4*' (default: all)")
    sub.add_argument("--pretrained", action="store_true", help="list checkpoints instead of networks")
    sub.add_argument("-l", "--long", action="store_true", help="print a table in a pipe too")
    sub.add_argument("--parameters", action="store_true", help="add the number of parameters (takes a few seconds)")


def _info(sub: argparse.ArgumentParser) -> None:
    """Describes a network: group, parameters, multiply-adds, image sizes, paper, checkpoints with results, layers."""
    sub.add_argument("name", metavar="NAME", help="a network, or a checkpoint by name, folder or file")
    sub.add_argument("--layers", action="store_true", help="list every layer, not only stem, blocks and head")


def _predict(sub: argparse.ArgumentParser) -> None:
    """Classifies an image and its rotated copies, or many images.

    Of one image it prints the largest change of a probability. With several files, a folder or a file of arrays, it
    prints a line for each image: the file, each network's class and its probability.
    """
    sub.add_argument("images", nargs="+", metavar="FILE", help="image files, folders of such, and .npz or .npy files")
    sub.add_argument(
        "--model",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="pretrained networks to compare, also .onnx files (default: p4_cnn and its baseline z2_cnn)",
    )
    sub.add_argument("--invert", action="store_true", help="invert the image: for dark strokes on a light background")
    sub.add_argument(
        "--csv",
        action="store_true",
        help="of several images, print comma-separated values: a line for each, with the probability of each class",
    )
    _threshold(sub, "predict this class wherever its probability is at least P, and nowhere else, such as defect=0.2")
    _tta(sub)
    sub.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the networks run (default: cpu)")


def _threshold(sub: argparse.ArgumentParser, what: str) -> None:
    sub.add_argument(
        "--threshold", action="append", default=[], type=threshold, metavar="CLASS=P", help=f"{what}; may be repeated"
    )


def threshold(text: str) -> tuple[str, float]:
    """A class and its threshold, of ``CLASS=P``."""
    name, _, value = text.rpartition("=")
    return name, float(value)


def count(text: str) -> int:
    """A number of pixels or repetitions."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"at least 1, got {value}")
    return value


def _tta(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--tta",
        choices=["p4", "p4m", "z2m"],
        help="test-time augmentation: average the probabilities over the copies of each image, rotated by multiples of "
        "90° (p4), reflected too (p4m), or reflected alone (z2m), in 4, 8 or 2 times the time; for networks that are "
        "not invariant to these",
    )


def _finetune(sub: argparse.ArgumentParser) -> None:
    """Fine-tunes a network on your images.

    It is trained, evaluated, and written as a checkpoint that can be loaded, exported and published. The same command
    resumes an interrupted run.
    """
    sub.add_argument("name", metavar="NAME", help="a network, or a checkpoint by name, folder or file")
    sub.add_argument(
        "data",
        metavar="DATA_DIR",
        help="a folder of class folders, or with folders train, val and test of such; a .npz file; or a data set: "
        "cifar10, EuroSAT or another of torchvision, hf:OWNER/NAME",
    )
    sub.add_argument("--output", required=True, metavar="DIR", help="the folder to write: checkpoint and report")
    sub.add_argument(
        "--invariant",
        choices=["p4", "p4m", "z2m"],
        help="make a timm network invariant: to rotations by 90°, reflections too, or reflections alone",
    )
    sub.add_argument(
        "--copies",
        type=int,
        metavar="N",
        help="of the rotated and reflected copies of an image, take N, 1 for a canonical one (default: all)",
    )
    sub.add_argument("--weights", metavar="FILE", help="weights of a timm network, .safetensors or .pth")
    sub.add_argument(
        "--size", type=count, help="the side of the images in pixels (default: the network's own; 128 for one of timm)"
    )
    sub.add_argument(
        "--channels",
        type=int,
        choices=[1, 3, 4],
        help="channels of image files (default: 1 if all are grayscale, else 3)",
    )
    sub.add_argument(
        "--pretrained",
        action=argparse.BooleanOptionalAction,
        help="start from trained weights (default: if there are any)",
    )
    sub.add_argument(
        "--freeze",
        nargs="*",
        action="extend",
        metavar="MODULE",
        help="modules to freeze (without names: all but the classifier; a linear one is fitted at once unless "
        "--epochs are given)",
    )
    sub.add_argument("--epochs", type=int, help="the number of epochs (default: by the number of images)")
    sub.add_argument(
        "--minutes", type=float, metavar="M", help="train for this time: epochs by the speed of the first steps"
    )
    sub.add_argument("--batch-size", type=int, help="images per step (default: 32, or less for few images)")
    sub.add_argument("--lr", type=float, help="the highest learning rate (default: by optimizer)")
    sub.add_argument("--layer-decay", type=float, metavar="F", help="factor of the learning rate for each layer below")
    sub.add_argument("--patience", type=int, help="epochs without improvement before stopping (default: none)")
    sub.add_argument("--balance", action="store_true", help="weight classes in the loss by the inverse of their size")
    sub.add_argument(
        "--ema",
        dest="ema_decay",
        type=float,
        metavar="DECAY",
        help="average the weights over steps with this decay, such as 0.99",
    )
    sub.add_argument(
        "--augment",
        help="none, shifts, flips, quarter_rotations, quarter_rotations_flips, rotations, rotations_shifts, affine, "
        "affine_color, standard, standard_pad2, standard_cutout; or missing: the 90° rotations and reflections that "
        "are not in the network's group (default: rotations_shifts for networks that are equivariant to rotations, "
        "affine for those to rotations and reflections, shifts for others)",
    )
    sub.add_argument(
        "--precision",
        choices=["float32", "bfloat16"],
        help="the number format of the layers (default: what is faster in a few steps)",
    )
    sub.add_argument(
        "--channels-last",
        action=argparse.BooleanOptionalAction,
        help="the memory format of images and fields (default: what is faster in a few steps)",
    )
    for part, use in (("valid", "validation"), ("test", "the test")):
        sub.add_argument(
            f"--{part}",
            dest=f"{part}_fraction",
            type=float,
            metavar="F",
            help=f"the fraction held out for {use} (default: 0.15 if the images have no part for it)",
        )
    sub.add_argument(
        "--split-by",
        metavar="SOURCE",
        help="hold out whole patients, slides or scenes: 'folder' for the folders inside of the class folders, a "
        "regular expression for a part of the files' names, or the name of an array of a .npz file",
    )
    sub.add_argument("--seed", type=int, help="default: 0")
    sub.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="other keys of eqzoo.engine.Recipe, such as optimizer=nmuon",
    )
    _reading(sub)


def _reading(sub: argparse.ArgumentParser) -> None:
    """The options that say from where and how images are read, and by which device they are computed."""
    sub.add_argument("--data-dir", default="data", metavar="DIR", help="the folder of named data sets (default: data)")
    sub.add_argument(
        "--download", action="store_true", help="download a named data set if it is missing (hf: always does)"
    )
    sub.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU where there is one")
    sub.add_argument(
        "--workers", type=int, default=4, help="processes that read images that are not in memory (default: 4)"
    )


def _evaluate(sub: argparse.ArgumentParser) -> None:
    """Evaluates a network on labeled images.

    Prints accuracy, precision, recall and F1 of each class, the confusion matrix and the accuracy on rotated images.
    Classes are matched by name, such as of their folders.
    """
    sub.add_argument("name", metavar="NAME", help="a checkpoint by name, folder or file, or an .onnx file")
    sub.add_argument(
        "data",
        metavar="DATA_DIR",
        help="a folder with a folder of images for each class, or with folders train, val and test of such; a .npz "
        "file; or a data set by name, as of eqzoo finetune",
    )
    sub.add_argument("--split", choices=["train", "val", "test"], help="default: test, or val, or all images")
    sub.add_argument(
        "--rotated",
        type=int,
        metavar="N",
        help="the images that are rotated, at most, each 28 times (default: 200, or fewer if that takes more than two "
        "minutes); 0 for none",
    )
    sub.add_argument(
        "--csv",
        action="store_true",
        help="print comma-separated values instead: a line for each image, with its class and all probabilities",
    )
    _threshold(sub, "print recall, specificity and precision of this class where its probability is at least P")
    _tta(sub)
    _reading(sub)


def _compare(sub: argparse.ArgumentParser) -> None:
    """Compares networks that were fine-tuned and evaluated on the same images.

    Prints accuracy and mean F1 with intervals of the differences, accuracy on rotated images, and cost.
    """
    sub.add_argument("folders", nargs="+", metavar="DIR", help="folders that eqzoo finetune wrote, two or more")


def _attention(sub: argparse.ArgumentParser) -> None:
    """Draws the attention of a layer, for an image and its rotated copies.

    There is a map for every pose; the maps rotate with the image.
    """
    sub.add_argument("name", metavar="NAME", help="a network or a checkpoint")
    sub.add_argument("image", metavar="FILE", help="an image file")
    sub.add_argument("output", metavar="OUT", help="the figure to write: .png, .svg or .pdf")
    sub.add_argument("--layer", help="the layer (default: the first whose attention has poses; --json lists them)")
    sub.add_argument("--group", help="the group of the copies: z2m, r2, p4, p4m (default: the network's)")
    sub.add_argument("--head", type=int, help="the head, output field (attentive convolution) or slice (E4)")
    sub.add_argument("--pose", type=int, help="the pose of the query, in group self-attention")
    sub.add_argument(
        "--place",
        type=int,
        nargs=2,
        metavar=("ROW", "COLUMN"),
        help="the query position, in pixels of the layer's input (default: what each position receives from all)",
    )
    weights = sub.add_mutually_exclusive_group()
    weights.add_argument("--checkpoint", metavar="FILE", help="weights, a .safetensors file")
    weights.add_argument("--untrained", action="store_true", help="use random weights of a fixed seed")
    sub.add_argument("--invert", action="store_true", help="invert the image: for dark strokes on a light background")
    sub.add_argument("--dpi", type=count, default=150, help="pixels per inch (default: 150)")


def _convert(sub: argparse.ArgumentParser) -> None:
    """Converts a checkpoint of another project to weights of a network of eqzoo that computes the same function."""
    sub.add_argument("source", choices=["att_gconvs", "octic_vits"], help="the project that the checkpoint is from")
    sub.add_argument("path", metavar="FILE", help="the checkpoint, a .pth file")
    sub.add_argument("--model", required=True, metavar="NAME", help="the network of eqzoo that takes the weights")
    sub.add_argument(
        "--output", required=True, metavar="FILE", help="the .safetensors file, or of octic_vits the folder, to write"
    )
    sub.add_argument(
        "--set",
        action="append",
        metavar="KEY=VALUE",
        help="octic_vits: an argument of the network that the file does not tell, such as num_heads=3",
    )
    sub.add_argument(
        "--untransposed",
        action="store_true",
        help="att_gconvs: convert a network trained on transposed images, such as the released digit networks, to one "
        "that takes images as they are",
    )


def _export(sub: argparse.ArgumentParser) -> None:
    """Writes a network as ONNX (.onnx) or as a program of torch's operators (.pt2), and compares its outputs."""
    sub.add_argument("source", metavar="NAME", help="a name, a checkpoint's folder or a .safetensors file")
    sub.add_argument("output", metavar="FILE", help="the file to write, .onnx or .pt2")
    sub.add_argument("--model", metavar="NAME", help="the network of weights without config.json")
    sub.add_argument("--size", type=count, metavar="PIXELS", help="the side of the images (default: the network's)")
    sub.add_argument("--opset", type=int, metavar="N", help="the ONNX operators (default: 18)")
    sub.add_argument(
        "--int8", nargs="+", metavar="IMAGES", help="8-bit numbers, in the ranges of these images or arrays"
    )
    sub.add_argument(
        "--no-irreps",
        dest="irreps",
        action="store_false",
        help="in an .onnx file, write wide group convolutions as plain ones, which are slower on CPUs",
    )
    sub.add_argument("--untrained", action="store_true", help="export random weights")


def _page(sub: argparse.ArgumentParser) -> None:
    """Writes a web page that classifies images.

    It is one HTML file with a network and ONNX Runtime Web. It opens from a disk or a mail, classifies images that are
    dropped on it, and sends nothing anywhere. The runtime is downloaded once, from the npm registry.
    """
    sub.add_argument("source", metavar="NAME", help="a checkpoint by name, folder or file, or an .onnx file")
    sub.add_argument("output", metavar="FILE", help="the file to write, .html")
    sub.add_argument(
        "--against", metavar="NAME", help="a network of the same classes to show beside, such as a plain one"
    )
    _threshold(sub, "predict this class wherever its probability is at least P; can be changed in the page")
    sub.add_argument("--title", metavar="TEXT", help="the heading (default: the name of the network)")


def _check(sub: argparse.ArgumentParser) -> None:
    """Measures the equivariance error of a network.

    If it is more than round-off, a diagnosis follows. Exit code 0: exact, 1: not exact.
    """
    what = "a network of eqzoo or timm, a checkpoint's folder, a .safetensors file or an .onnx file"
    sub.add_argument("source", metavar="NAME", help=what)
    sub.add_argument("--group", metavar="GROUP", help="p4, p4m, r2, r2m or z2m (default: the network's own, or p4)")
    sub.add_argument("--model", metavar="NAME", help="the network of weights without config.json")
    sub.add_argument("--size", type=count, metavar="PIXELS", help="the side of the images (default: the network's)")
    sub.add_argument(
        "--tolerance",
        type=float,
        metavar="ERROR",
        help="the largest error that counts as exact (default: by number type)",
    )
    sub.add_argument(
        "--pretrained",
        action="store_true",
        help="load weights, which must be there; a timm network has random ones without it",
    )


def _bench(sub: argparse.ArgumentParser) -> None:
    """Times networks on this machine.

    In eager mode, deployed (as plain convolutions) and compiled: medians of interleaved runs.
    """
    sub.add_argument("names", nargs="+", metavar="NAME", help="networks, timed in interleaved runs")
    sub.add_argument("--batch-sizes", type=count, nargs="+", action="extend", metavar="N", help="default: 1 32")
    sub.add_argument(
        "--size", type=count, metavar="N", help="side of the images in pixels (default: that of each network)"
    )
    sub.add_argument(
        "--against", metavar="NAME", help="the network to compare with (default: the z2 network of the same name)"
    )
    sub.add_argument("--rounds", type=count, default=20, help="timed runs of each network (default: 20)")
    sub.add_argument("--no-compile", action="store_true", help="skip torch.compile, which takes a minute or more")
    sub.add_argument("--threads", type=count, help="CPU threads (default: torch's)")
    sub.add_argument(
        "--precision", choices=["float32", "bfloat16"], default="float32", help="the number format (default: float32)"
    )
    sub.add_argument(
        "--channels-last", action="store_true", help="images, and with them fields, channels last in memory"
    )
    sub.add_argument("--device", help="such as cpu or cuda (default: cuda if there is one)")


def _completion(sub: argparse.ArgumentParser) -> None:
    """Prints a script that completes commands, options and the names of networks in a shell.

    Each shell reads it from a file: bash from ~/.local/share/bash-completion/completions/eqzoo, zsh from _eqzoo in a
    folder of $fpath, fish from ~/.config/fish/completions/eqzoo.fish.
    """
    sub.add_argument("shell", choices=["bash", "zsh", "fish"], help="the shell")


def _publish(sub: argparse.ArgumentParser) -> None:
    """Checks the folder of a fine-tuned network, and uploads it to the Hugging Face Hub.

    The folder that eqzoo finetune wrote is its Hub repo: weights, config.json, results, card. Nothing is uploaded
    without --push OWNER.
    """
    sub.add_argument("folder", metavar="DIR", help="the folder that eqzoo finetune wrote")
    sub.add_argument("--checkpoint", metavar="TEXT", help="its name (default: <network>.<data>, by the images' folder)")
    sub.add_argument(
        "--license", metavar="TEXT", help="of the weights, as the Hub names it (default: of their start, else none)"
    )
    sub.add_argument("--base-model", metavar="REPO", help="the Hub repo of the weights that the network started from")
    sub.add_argument(
        "--label-names", nargs="+", metavar="TEXT", help="names for numbered classes, in the order of the numbers"
    )
    sub.add_argument("--onnx", action="store_true", help="write model.onnx too, checked against the network")
    sub.add_argument("--push", metavar="OWNER", help="upload to the Hub repo OWNER/<checkpoint>; without it nothing is")
    sub.add_argument("--private", action="store_true", help="a repo that --push makes is private, not public")
    sub.add_argument("--replace", action="store_true", help="replace other weights on the Hub")


COMMANDS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "list": _list,
    "info": _info,
    "predict": _predict,
    "finetune": _finetune,
    "evaluate": _evaluate,
    "compare": _compare,
    "attention": _attention,
    "convert": _convert,
    "export": _export,
    "page": _page,
    "publish": _publish,
    "check": _check,
    "bench": _bench,
    "completion": _completion,
}
