"""Kernels for GPUs, in Triton."""
