"""Meshes, layouts and shardings: how one program covers one device or many."""

DEFAULT_LAYOUT = "zero1"
