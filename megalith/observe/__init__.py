"""What a run tells about itself and its machine: metrics, plots, logs, rates."""
