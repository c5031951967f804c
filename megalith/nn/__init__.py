"""Modules of Transformer models."""
