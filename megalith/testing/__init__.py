"""Tools for tests and proofs: live ranks, and tolerances that carry their reasons."""
