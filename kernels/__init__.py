"""Tensors in, tensors out: the numeric kernels of slotmill."""
