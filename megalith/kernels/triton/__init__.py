"""Triton kernels and their launch parameters."""
