"""Serving plans without torch and without a clock: KV cache blocks, prefix cache, scheduler."""
