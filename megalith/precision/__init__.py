"""Quantized number formats."""
