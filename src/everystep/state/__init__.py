"""What a training state is: knows torch, knows no files."""
