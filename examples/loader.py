"""What the token loader can do: packed documents, resuming mid-stream, and shuffled blocks.

    python examples/loader.py [FOLDER]

Without a folder, a small data set is made in a temporary one. The reference: docs/reference/api.md.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from jspeed.corpus.tokenise import Tokenising, prepare_text
from jspeed.data import Shuffle, TokenLoader, find_split

BOS = 256  # of the tokenizer "bytes"


def make(folder: Path) -> Path:
    """Write shards of byte tokens: short documents."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(400):
        (texts / f"{number:03d}.txt").write_text(f"{number} {'abc ' * (number % 40)}")
    return prepare_text(
        [texts], folder / "shards", Tokenising("bytes", shard_tokens=10_000, processes=1)
    )


def main(folder: Path) -> None:
    """Read documents, resume, and read the same shards in blocks."""
    shards = find_split(make(folder), "train")
    options = {
        "lanes": 10,  # rows of a batch
        "lane_len": 256,
        # a lane is packed with documents; each starts at its BOS token and is cut after max_doc_len
        "align": "bos",
        "bos_id": BOS,
        "max_doc_len": 200,
        "max_docs": 64,  # makes num_docs and doc_offsets
    }
    with TokenLoader(shards, **options) as loader:
        batch = next(loader)
        counts = batch.num_docs.tolist()
        print(f"batch {batch.step}: {batch.inputs.shape} tokens, documents per lane {counts}")
        first = batch.doc_offsets[0, : batch.num_docs[0] + 1]
        print(f"lane 0 has documents at {first[:-1].tolist()} of {first[-1]} tokens")
        state = loader.state_dict()  # integers and strings, ready for JSON
        wanted = next(loader).tokens
        with TokenLoader(shards, **options) as resumed:
            resumed.load_state_dict(state)
            assert np.array_equal(next(resumed).tokens, wanted)
        print(f"resumed at step {state['step']} with the same tokens")
    windows = []
    for shuffle in (None, Shuffle(seed=1)):
        with TokenLoader(shards, lanes=10, lane_len=150, shuffle=shuffle) as loader:
            windows.append([bytes(row) for _ in range(5) for row in next(loader).tokens])
    both = set(windows[0]) & set(windows[1])
    print(f"blocks in a random order: {len(both)} of the first 50 are so in the files")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
