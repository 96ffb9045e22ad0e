"""Primitives that recipes compose: plain functions on plain arrays, with the shape in the name.

Letters in names: B rows of the batch, T tokens in a row, S keys seen by a query, D model width, H heads,
K width of one head, F width of the MLP, V vocabulary.
"""
