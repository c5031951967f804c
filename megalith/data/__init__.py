"""Datasets: tokenizers, the .bin/.idx token store, sample order, blends, fine-tuning data and
`prepare`."""
