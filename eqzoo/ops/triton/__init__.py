"""Triton kernels of the neighbourhood operations, for GPUs. Importing a module of this package needs Triton."""
