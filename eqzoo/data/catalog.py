"""Every data set that the package knows, described once: images, classes, statistics, words and loader."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .chula_rbc12 import CELL_CLASSES, chula_rbc12
from .cifar import cifar
from .class_folders import ClassFolders, radio_galaxies, tiny_imagenet
from .pcam import CLASSES as PCAM_CLASSES
from .pcam import pcam
from .rotated_mnist import rotmnist, rotmnist_from_amat
from .splits import AnySplit

Reader = Callable[[str | os.PathLike[str], bool, tuple[int, int]], Mapping[str, AnySplit]]


@dataclass(frozen=True)
class DataSet:
    """A data set: its images and classes, how they are normalized, its description and its loader.

    Args:
        name: The name in `load_splits` and behind the dot of a checkpoint's name.
        title: The name in prose.
        noun: What one of its images is called, in the plural.
        text: What was trained and tested on; ``{train}``, ``{valid}`` and ``{test}`` stand for the counts.
        use: What a network trained on it is for, and where that ends.
        read: Reads the splits from the folder of data sets, downloading them if the second argument says so, at the
            height and width of the third if its images are large; None for a data set that is not read here.
        input_size: Channels, height and width of an image.
        mean: The mean of each channel over the training images, for pixel values in 0 to 1.
        std: The standard deviation, the same.
        classes: The names of the classes, or () where they are not listed here.
        num_classes: The number of classes; None for that of the names.
        hub_id: The data set on the Hub that it is or is made from, or None.
        same_as_hub: Whether it is that data set, rather than made from it.
        images: What an image has to look like, beyond size and color; may be empty.
        fixed_scale: Whether all images have one scale, such as one magnification, so that an object has a certain size.
        license: The terms that its images are published under; empty where they are not listed here.
        test_split: What its authors call the split of the test images.
    """

    name: str
    title: str
    noun: str
    text: str
    use: str
    read: Reader | None = None
    input_size: tuple[int, int, int] = (3, 224, 224)
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.25,)
    classes: tuple[str, ...] = ()
    num_classes: int | None = None
    hub_id: str | None = None
    same_as_hub: bool = False
    images: str = ""
    fixed_scale: bool = False
    license: str = ""
    test_split: str = "test"

    @property
    def side(self) -> int:
        """The side of its images, in pixels."""
        return self.input_size[1]

    def cfg(self, **more: Any) -> dict[str, Any]:
        """The entries of timm's ``pretrained_cfg`` for networks trained on it, and ``more``."""
        found = {
            "num_classes": self.num_classes or len(self.classes),
            "input_size": self.input_size,
            "mean": self.mean,
            "std": self.std,
            "crop_pct": 1.0,
            "interpolation": "bicubic",
        }
        return found | ({"label_names": self.classes} if self.classes else {}) | more


def dataset(name: str) -> DataSet:
    """The data set of a name; a general description for one that is not in the catalog."""
    return CATALOG.get(name) or DataSet(
        name,
        name,
        "images",
        f"the data set {name}: {{train}} training, {{valid}} validation and {{test}} test images",
        f"Trained on one data set, {name}. Every image gets one of its classes, whatever it shows, and the "
        "probabilities are not calibrated. Whether it is good enough for a purpose has to be measured on images of "
        "that purpose.",
    )


_BENCHMARK = (
    "A small network for a benchmark of research: to compare networks, to study equivariance, and to start fine-tuning "
    "from. Every image gets one of the classes, whatever it shows, and the probabilities are not calibrated."
)

_ROTMNIST = DataSet(
    "rotmnist",
    "Rotated MNIST, regenerated",
    "digits",
    "rotated MNIST made anew from MNIST: {train} training and {valid} validation digits from MNIST's training "
    "split, {test} test digits from the rest of it and MNIST's test split, each rotated by a random angle with "
    "bicubic interpolation. It has the size and the distribution of the original set but not its digits, so "
    "numbers on the two are close, not the same",
    "Made for single digits on a plain ground, to show and to test equivariance; it knows nothing else.",
    read=lambda data_dir, download, size: rotmnist(data_dir, download),
    input_size=(1, 28, 28),
    mean=(0.1314,),
    std=(0.3025,),
    classes=tuple("0123456789"),
    hub_id="ylecun/mnist",
    images="white on black, with digits rotated by any angle, not transposed",
)

_CIFAR10 = DataSet(
    "cifar10",
    "CIFAR-10",
    "images",
    "CIFAR-10: {train} training and {valid} validation images from its training split, and the {test} images "
    "of its test split, of ten kinds of animals and vehicles",
    f"{_BENCHMARK} CIFAR-10 has a fixed orientation: a network can be accurate there and not on rotated images.",
    read=lambda data_dir, download, size: cifar("CIFAR10", data_dir, download),
    input_size=(3, 32, 32),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    hub_id="uoft-cs/cifar10",
    same_as_hub=True,
    images="photographs of one object that fills the frame",
)

_CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""

_EUROSAT_TILES = {
    "AnnualCrop": 3_000,
    "Forest": 3_000,
    "HerbaceousVegetation": 3_000,
    "Highway": 2_500,
    "Industrial": 2_500,
    "Pasture": 2_000,
    "PermanentCrop": 2_500,
    "Residential": 3_000,
    "River": 2_500,
    "SeaLake": 3_000,
}
_PBC_CELLS = {
    "basophil": 1_218,
    "eosinophil": 3_117,
    "erythroblast": 1_551,
    "ig": 2_895,
    "lymphocyte": 1_214,
    "monocyte": 1_420,
    "neutrophil": 3_329,
    "platelet": 2_348,
}
_UCMERCED_NAMES = """
agricultural airplane baseballdiamond beach buildings chaparral denseresidential forest freeway golfcourse harbor
intersection mediumresidential mobilehomepark overpass parkinglot river runway sparseresidential storagetanks
tenniscourt
"""
_LC25000_GROUPS = {"lung_aca": 243, "lung_n": 249, "lung_scc": 248}
# In the order of the WordNet numbers, the first of the names that ImageNet has for each.
_TINY_IMAGENET_NAMES = """
goldfish | European fire salamander | bullfrog | tailed frog | American alligator | boa constrictor | trilobite |
scorpion | black widow | tarantula | centipede | goose | koala | jellyfish | brain coral | snail | slug | sea slug |
American lobster | spiny lobster | black stork | king penguin | albatross | dugong | Chihuahua | Yorkshire terrier |
golden retriever | Labrador retriever | German shepherd | standard poodle | tabby | Persian cat | Egyptian cat |
cougar | lion | brown bear | ladybug | fly | bee | grasshopper | walking stick | cockroach | mantis | dragonfly |
monarch | sulphur butterfly | sea cucumber | guinea pig | hog | ox | bison | bighorn | gazelle | Arabian camel |
orangutan | chimpanzee | baboon | African elephant | lesser panda | abacus | academic gown | altar | apron | backpack
| bannister | barbershop | barn | barrel | basketball | bathtub | beach wagon | beacon | beaker | beer bottle | bikini
| binoculars | birdhouse | bow tie | brass | broom | bucket | bullet train | butcher shop | candle | cannon | cardigan
| cash machine | CD player | chain | chest | Christmas stocking | cliff dwelling | computer keyboard | confectionery |
convertible | crane | dam | desk | dining table | drumstick | dumbbell | flagpole | fountain | freight car | frying
pan | fur coat | gasmask | go-kart | gondola | hourglass | iPod | jinrikisha | kimono | lampshade | lawn mower |
lifeboat | limousine | magnetic compass | maypole | military uniform | miniskirt | moving van | nail | neck brace |
obelisk | oboe | organ | parking meter | pay-phone | picket fence | pill bottle | plunger | pole | police van | poncho
| pop bottle | potter's wheel | projectile | punching bag | reel | refrigerator | remote control | rocking chair |
rugby ball | sandal | school bus | scoreboard | sewing machine | snorkel | sock | sombrero | space heater | spider web
| sports car | steel arch bridge | stopwatch | sunglasses | suspension bridge | swimming trunks | syringe | teapot |
teddy | thatch | torch | tractor | triumphal arch | trolleybus | turnstile | umbrella | vestment | viaduct |
volleyball | water jug | water tower | wok | wooden spoon | comic book | plate | guacamole | ice cream | ice lolly |
pretzel | mashed potato | cauliflower | bell pepper | mushroom | orange | lemon | banana | pomegranate | meat loaf |
pizza | potpie | espresso | alp | cliff | coral reef | lakeside | seashore | acorn
"""

_TINY_IMAGENET_CLASSES = tuple(" ".join(_TINY_IMAGENET_NAMES.split()).split(" | "))
_TINY_SIZES = {"train": 100_000, "val": 10_000}
_RADIO_SIZES = {"train": 1_758, "valid": 200, "test": 200}

CATALOG: dict[str, DataSet] = {
    each.name: each
    for each in (
        _ROTMNIST,
        replace(
            _ROTMNIST,
            name="rotmnist_original",
            title="Rotated MNIST",
            text="rotated MNIST: {train} training, {valid} validation and {test} test digits",
            read=lambda data_dir, download, size: rotmnist_from_amat(data_dir),
        ),
        _CIFAR10,
        replace(
            _CIFAR10,
            name="cifar100",
            title="CIFAR-100",
            text="CIFAR-100: {train} training and {valid} validation images from its training split, and the {test} "
            "images of its test split, of a hundred kinds of things",
            use=f"{_BENCHMARK} CIFAR-100 has a fixed orientation: a network can be accurate there and not on rotated "
            "images.",
            read=lambda data_dir, download, size: cifar("CIFAR100", data_dir, download),
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            classes=tuple(_CIFAR100_NAMES.split()),
            hub_id="uoft-cs/cifar100",
        ),
        DataSet(
            "pcam",
            "PatchCamelyon",
            "patches",
            "PatchCamelyon: {train} training, {valid} validation and {test} test patches of lymph node sections "
            "stained with haematoxylin and eosin; the class says whether the middle 32 x 32 pixels hold tumour tissue",
            "For research on methods alone: it is no medical device and must not be used to diagnose. It has seen one "
            "stain and the scanners of the two hospitals of the Camelyon16 challenge; on other stains, scanners or "
            "tissues it is not to be relied on before it has been measured there.",
            read=lambda data_dir, download, size: pcam(data_dir, download),
            input_size=(3, 96, 96),
            mean=(0.701, 0.538, 0.692),
            std=(0.235, 0.277, 0.213),
            classes=PCAM_CLASSES,
            hub_id="1aurent/PatchCamelyon",
            same_as_hub=True,
            images="patches at 10x magnification, 0.97 micrometres a pixel",
        ),
        DataSet(
            "eurosat",
            "EuroSAT",
            "tiles",
            "EuroSAT in red, green and blue: {train} training, {valid} validation and {test} test tiles of 64 x 64 "
            "pixels from Sentinel-2, drawn class by class with a fixed seed; the class is one of ten kinds of land "
            "use. There is no official split, and neighboring tiles may be in different parts",
            "Made to start fine-tuning from on images from above, and to show equivariance. It has seen European land "
            "at 10 m a pixel under a clear sky; at other resolutions, seasons or regions it is not to be relied on "
            "before it has been measured there.",
            read=ClassFolders(
                ("eurosat/2750",), _EUROSAT_TILES, "https://github.com/phelber/EuroSAT", torchvision="EuroSAT"
            ),
            input_size=(3, 64, 64),
            mean=(0.3444, 0.3805, 0.4081),
            std=(0.2024, 0.1369, 0.1157),
            classes=tuple(_EUROSAT_TILES),
            images="satellite tiles at 10 m a pixel, in natural color",
            fixed_scale=True,
            license="MIT",
        ),
        DataSet(
            "chula_rbc12",
            "Chula RBC-12",
            "cells",
            "Chula RBC-12: {train} training, {valid} validation and {test} test cells, crops of 80 x 80 pixels around "
            "the labeled centers of red blood cells in micrographs of blood smears; the class is one of eleven kinds. "
            "The parts differ in their micrographs: runs of ten consecutive ones stay together",
            "For research on methods, and to start fine-tuning from: it is no medical device and must not be used to "
            "diagnose. It has seen the smears of one laboratory, with one microscope and camera; on others it is not "
            "to be relied on before it has been measured there.",
            read=lambda data_dir, download, size: chula_rbc12(data_dir),  # nobody serves it for a download
            input_size=(3, 80, 80),
            mean=(0.5293, 0.5313, 0.5409),
            std=(0.0793, 0.1105, 0.0803),
            classes=CELL_CLASSES,
            images="single red blood cells in the center of a crop, stained and taken as in the data set: at a "
            "magnification of 1,000, about 50 of the 80 pixels of a crop wide",
            fixed_scale=True,
            license="MIT",
        ),
        DataSet(
            "pbc",
            "PBC",
            "cells",
            "PBC, peripheral blood cells of Acevedo et al.: {train} training, {valid} validation and {test} test "
            "images of single cells of normal blood, drawn class by class with a fixed seed; the class is one of eight "
            "kinds. "
            "There is no official split and no patient is known, so cells of one person are in several parts",
            "For research on methods, and to start fine-tuning from: it is no medical device and must not be used to "
            "diagnose. It has seen one hospital, one analyzer and one stain; on others it is not to be relied on "
            "before it has been measured there.",
            read=ClassFolders(
                ("pbc", "PBC_dataset_normal_DIB", "PBC_dataset_normal_DIB/PBC_dataset_normal_DIB"),
                _PBC_CELLS,
                "https://doi.org/10.17632/snkd93bnjr.1",
            ),
            input_size=(3, 360, 360),
            mean=(0.8735, 0.7482, 0.7214),
            std=(0.1592, 0.1864, 0.0801),
            classes=tuple(_PBC_CELLS),
            images="single blood cells in the center of a view of 360 x 363 pixels, stained with May Grünwald-Giemsa "
            "and taken with a CellaVision DM96",
            fixed_scale=True,
            license="CC BY 4.0",
        ),
        DataSet(
            "ucmerced",
            "UC Merced Land Use",
            "scenes",
            "UC Merced Land Use: {train} training, {valid} validation and {test} test aerial scenes of towns in the "
            "United States, drawn class by class with a fixed seed; the class is one of 21 kinds of land use. There is "
            "no official split, and scenes of one place may be in several parts",
            "Made to start fine-tuning from on images from above, and to show equivariance. It has seen the United "
            "States at about 0.3 m a pixel; at other resolutions or regions it is not to be relied on before it has "
            "been measured there.",
            read=ClassFolders(
                ("ucmerced", "UCMerced_LandUse/Images", "Images"),
                dict.fromkeys(_UCMERCED_NAMES.split(), 100),
                "http://weegee.vision.ucmerced.edu/datasets/landuse.html",
            ),
            input_size=(3, 256, 256),
            mean=(0.4831, 0.4883, 0.4488),
            std=(0.2201, 0.2039, 0.1976),
            classes=tuple(_UCMERCED_NAMES.split()),
            images="aerial photographs of 256 x 256 pixels of about 0.3 m, which are scaled, in natural color",
            fixed_scale=True,
            license="public domain",
        ),
        DataSet(
            "lc25000",
            "LC25000, lung",
            "patches",
            "the lung tissue of LC25000: {train} training, {valid} validation and {test} test patches stained with "
            "haematoxylin and eosin; the class is benign tissue, adenocarcinoma or squamous cell carcinoma. Its "
            "15,000 images are rotated and reflected copies of 750 patches, in which LC25000-clean tells 740 groups "
            "apart: images of one group stay in one part, and the groups of a class are drawn with a fixed seed",
            "For research on methods, and to start fine-tuning from: it is no medical device and must not be used to "
            "diagnose. It has seen the slides of one hospital, and which patients they are of is not known; on others "
            "it is not to be relied on before it has been measured there.",
            read=ClassFolders(
                ("lc25000", "lung_colon_image_set/lung_image_sets", "lung_image_sets"),
                _LC25000_GROUPS,
                "https://arxiv.org/abs/1912.12142, the groups at https://github.com/GeorgeBatch/LC25000-clean",
                group=r"group\d+",
            ),
            input_size=(3, 224, 224),
            mean=(0.6683, 0.5322, 0.8475),
            std=(0.1690, 0.1978, 0.1123),
            classes=tuple(_LC25000_GROUPS),
            images="histological patches of 768 x 768 pixels, which are scaled",
            fixed_scale=True,
            license="free to use, without a formal license",
        ),
        DataSet(
            "radio",
            "FIRST radio galaxies",
            "galaxies",
            "radio galaxies of the FIRST survey, as Griese et al. collected them: {train} training, {valid} validation "
            "and {test} test images in the split of the authors; the class is compact, FRI, FRII or bent",
            "For research: it has seen bright sources of one survey, each in the middle of its image, and gives every "
            "image one of four classes.",
            read=lambda data_dir, download, size: radio_galaxies(data_dir, size, _RADIO_SIZES),
            input_size=(1, 300, 300),
            mean=(0.0005,),
            std=(0.0143,),
            classes=("FRI", "FRII", "bent", "compact"),
            images="radio maps of FIRST, 300 x 300 pixels of 1.8 arcseconds, which are scaled, noise clipped to black",
            fixed_scale=True,
            license="scholarly, educational and private non-commercial use",
        ),
        DataSet(
            "tiny_imagenet",
            "Tiny ImageNet",
            "photographs",
            "Tiny ImageNet: {train} training and {valid} validation photographs from its training split, the latter "
            "drawn class by class with a fixed seed, and the {test} photographs of its validation split as test "
            "images, of 200 kinds of things",
            "To start fine-tuning from, and to compare networks. Photographs have a fixed orientation: a network can "
            "be accurate there and not on rotated images. Every image gets one of the classes, whatever it shows, and "
            "the probabilities are not calibrated.",
            read=lambda data_dir, download, size: tiny_imagenet(data_dir, _TINY_IMAGENET_CLASSES, size, _TINY_SIZES),
            input_size=(3, 64, 64),
            mean=(0.4803, 0.4481, 0.3974),
            std=(0.2764, 0.2689, 0.2816),
            classes=_TINY_IMAGENET_CLASSES,
            images="photographs of one object, scaled to 64 x 64 pixels",
            license="ImageNet's terms: non-commercial research",
            test_split="validation",
        ),
    )
}

# Not read here: weights of it come from other projects, and config.json has the names of its classes.
IMAGENET = DataSet(
    "imagenet",
    "ImageNet",
    "photographs",
    "ImageNet: photographs of 1,000 kinds of things",
    "Photographs have a fixed orientation: a network can be accurate there and not on rotated images.",
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    num_classes=1000,
)
