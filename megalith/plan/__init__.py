"""Decisions as plain values: pure functions that need no device."""
