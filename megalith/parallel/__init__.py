"""Collectives, groups and the layers that cut their weights over them."""
