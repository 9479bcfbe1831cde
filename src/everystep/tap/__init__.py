"""Gradients read off the network: packets become messages, messages pieces, pieces buffers."""
