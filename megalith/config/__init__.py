"""Every setting of every program, as small frozen dataclasses that import nothing heavy."""
