"""Faults that are planted to test that verification detects them."""
