"""Compiling for devices that are not here."""
