"""Checkpoints: named boxes of whole tensors, so that any layout loads what any other saved."""
