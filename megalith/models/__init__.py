"""Whole models, and the families that people know them by."""
