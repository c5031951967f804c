"""Translate arguments and launch scripts of Megatron-LM to Megalith settings."""
