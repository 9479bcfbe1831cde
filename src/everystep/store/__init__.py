"""What is kept, and how it becomes durable: knows files, bytes and hashes; knows no torch."""
