"""Parameter groups, optimizers, clipping, and how their rates move over a run."""
