"""Hugging Face folders: model families, config fields, tensors, conversion and adapters."""
