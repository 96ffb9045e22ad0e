"""Views of a plan: tables for the terminal, a picture, a page."""
