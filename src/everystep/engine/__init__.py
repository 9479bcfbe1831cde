"""What runs in the trainer: when bytes leave live tensors, and on which thread."""
