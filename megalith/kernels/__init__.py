"""Compute kernels: one operation per module, with a plain PyTorch reference that defines the result
and faster backends that are tested against it."""
