"""From what is stored to a proved state."""
