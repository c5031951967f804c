"""Modules of the models: each one file, each reads like the paper it comes from."""
