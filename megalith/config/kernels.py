"""How operations are computed: the fastest way, in torch's operations, or as their definitions say."""

from typing import Literal

Kernel = Literal["auto", "torch", "reference"]
"""auto: the fastest way on this machine; torch: torch operations with our own backward; reference: the plain
definition, whose backward is autograd's."""
