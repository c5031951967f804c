"""Megatron's arguments as settings of ours: which become what, which wait for a feature, which are
refused and why."""
