"""Environment of tests and doctests: offline, one thread per worker, Triton interpreted."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one pytest worker per core
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU; read when Triton is imported
