"""A plan to look at: tables for the terminal, a picture, a page."""
