"""Decisions as arithmetic: no torch, disk, clock or network in here."""
