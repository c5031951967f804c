"""Post-training of trained models: LoRA adapters, their export, and upcycling to a mixture of
experts."""
