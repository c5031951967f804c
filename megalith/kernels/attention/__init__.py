"""Attention kernels: the reference and its backends."""
