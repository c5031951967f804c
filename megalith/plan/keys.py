"""Random numbers without state: every draw is named by a key, so no layout, resume or order of work
changes it."""

import hashlib


def key(seed: int, purpose: str, name: str, *indices: int) -> int:
    """A 63-bit seed for one draw: what it is for, whose it is, and which one.

    The same arguments give the same key on every machine; blake2b keeps different arguments apart.
    """
    text = "\x00".join([str(seed), purpose, name, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
