"""Kernels for processors, compiled by numba on the user's machine."""
