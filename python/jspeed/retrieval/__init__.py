"""N-gram look-up over earlier steps: an index of the tokens that a run has trained on.

A recipe asks for it by its field ``beside``; a track of its own allows it. Nothing imports this
folder but recipes that use it.
"""

from jspeed._dataloader import ContextIndex
from jspeed.retrieval.ask import Retrieval
from jspeed.retrieval.retriever import Retriever
from jspeed.retrieval.rows import Matches

__all__ = ["ContextIndex", "Matches", "Retrieval", "Retriever"]
