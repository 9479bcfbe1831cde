"""What runs beside the trainer and survives it: staging memory, and the process that empties it."""
