"""Megalith: train, tune and serve transformers at any scale, from one laptop CPU to ten thousand
GPUs."""

__version__ = "0.1.0"
