"""The command line: one file per command, each prints one record."""
