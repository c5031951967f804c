"""The proof of a layout, on a laptop: its rules, the types of its tensors, and its numbers in
float64."""
