"""Stateless random numbers: each draw has a key, so results do not depend on layout, resume or
order."""

import hashlib


def key(seed: int, purpose: str, name: str, *indices: int) -> int:
    """Return a 63-bit seed for one draw, from the seed, the purpose, a name and indices.

    The same arguments give the same key on every machine; blake2b makes different arguments give
    different keys.
    """
    text = "\x00".join([str(seed), purpose, name, *map(str, indices)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
