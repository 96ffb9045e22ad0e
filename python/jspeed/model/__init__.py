"""Model primitives for recipes: pure functions on arrays, whose variable names end in their shapes.

Letters in names: B lanes, the rows of a batch: each holds documents packed one after the other; T
tokens in a lane; S keys seen by a query, or the capacity of a cache; D model width; H heads; K
width of one head; F width of the MLP, or frequencies of a head; V vocabulary; N tokens of all
lanes, or targets of a token, or coefficients; M documents of a lane and O their offsets (M + 1); P
position columns; E queries and keys side by side, or ids that all groups score; G groups; C
columns that a group scores; R rows of groups; I and J queries and keys of a block. A lower-case
letter is a part of that axis.
"""
