"""What tests and doctests share: they never leave the machine, and leave its cores to the workers."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # huggingface_hub reads it when it is first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # each worker fills a core; more threads would only fight for them
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; Triton reads it when it is first imported
