"""What is done with a model that has been trained already: adapters, and taking them elsewhere."""
