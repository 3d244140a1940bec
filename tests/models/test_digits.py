"""Published networks on digits drawn by code: their accuracy, and whether rotations by 90° change their answers."""

import pytest
import torch

import eqzoo
from eqzoo.data import normalize
from tests.conftest import slow

# The digits of 200 that each checkpoint classifies correctly. They are no sample of rotated MNIST: the numbers are
# pinned to detect changes, and compare no networks. Logits of the first two classes differ by more than round-off.
CORRECT = {
    "p4_alpha_ch_cnn.rotmnist": 200,
    "p4_alpha_cnn.rotmnist": 197,
    "p4_alpha_f_cnn.rotmnist": 200,
    "p4_alpha_rh_cnn.rotmnist": 200,
    "p4_alpha_sp_cnn.rotmnist": 194,
    "p4_asc_resnet29.rotmnist": 200,
    "p4_cnn.rotmnist": 200,
    "p4_cnn_w11.rotmnist": 200,
    "p4_cnn_w15.rotmnist": 200,
    "p4_cnn_w19.rotmnist": 200,
    "p4_e4net.rotmnist": 200,
    "p4_e4net_large.rotmnist": 200,
    "p4m_cnn.rotmnist": 200,
    "p4m_e4net.rotmnist": 196,
    "r12_gsanet_t.rotmnist": 199,
    "r16_gsanet_t.rotmnist": 198,
    "r4_gsanet_t.rotmnist": 196,
    "r8_gsanet_t.rotmnist": 199,
    "z2_cnn.rotmnist": 185,
    "z2_gsanet_t.rotmnist": 192,
}


def classes(name, images):
    model = eqzoo.create_model(name, pretrained=True).float().eval()
    x = normalize(images, model.pretrained_cfg["mean"], model.pretrained_cfg["std"], torch.float32)
    with torch.inference_mode():
        return torch.cat([model(part).argmax(1) for part in x.split(50)])


def test_every_checkpoint_for_digits_is_pinned():
    assert set(CORRECT) == set(eqzoo.list_pretrained("*.rotmnist"))


@pytest.mark.parametrize(
    "name",
    slow(CORRECT, {"p4_alpha_ch_cnn.rotmnist"} | {name for name in CORRECT if "gsanet" in name and name[0] == "r"}),
)
def test_drawn_digits_are_classified_as_before(name, digits):
    assert (classes(name, digits.images) == digits.labels).sum() == CORRECT[name]
