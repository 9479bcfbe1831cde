"""What one step changed: exact encodings of gradients, and who makes them sparse."""
