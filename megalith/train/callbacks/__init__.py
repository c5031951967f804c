"""Callbacks: they observe a run and request that it evaluates, saves or stops."""
