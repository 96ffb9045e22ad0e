"""Views of a plan: tables for the terminal, a plot, an HTML report."""
