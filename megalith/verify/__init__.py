"""Verification of a layout before training: rules, tensor types, schedules and float64 runs."""
