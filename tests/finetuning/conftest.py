"""Fine-tuning in float32, as a user has it, and faster."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _float32(_float64_and_seed):
    torch.set_default_dtype(torch.float32)
