"""What tests and doctests share: they never leave the machine."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # huggingface_hub reads it when it is first imported
