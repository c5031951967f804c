"""Estimates of what a run costs: memory, communication, FLOPs and time, without a device."""
