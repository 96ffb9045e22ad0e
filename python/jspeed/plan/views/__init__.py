"""Views of a plan: tables for the terminal and as a page, a plot."""
