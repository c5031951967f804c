"""Text to tokens to samples: tokenizers, the .bin/.idx store, the order of samples, blends and
`prepare`."""
