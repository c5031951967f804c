"""Rules across settings: which configs are rejected, and which settings have no effect."""
