"""What the token loader can do: mixtures, shuffled shards, packed documents, loss masks, and
resuming mid-stream.

    python examples/loader.py [FOLDER]

Without a folder, three small data sets are made in a temporary one. docs/api.md has the reference.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from jspeed.corpus.tokenise import Tokenising, prepare_text
from jspeed.data import Shuffle, TokenLoader, find_split

BOS = 256  # of the tokenizer "bytes"


def make(folder: Path) -> list[Path]:
    """Write two data sets of byte tokens: short documents of letters, and longer ones of digits."""
    made = []
    for name, document in (("letters", "abc " * 20), ("digits", "0123456789 " * 30)):
        texts = folder / f"{name}_texts"
        texts.mkdir()
        for number in range(400):
            (texts / f"{number:03d}.txt").write_text(f"{name} {number} {document}")
        made.append(
            prepare_text(
                [texts], folder / name, Tokenising("bytes", shard_tokens=10_000, processes=1)
            )
        )
    return made


def main(folder: Path) -> None:
    """Read a mixture of two sets, 7 lanes (rows of a batch) of letters to 3 of digits."""
    letters, digits = (find_split(path, "train") for path in make(folder))
    options = {
        "lanes": 10,
        "lane_len": 256,
        # a lane is packed with documents; each starts at its BOS token and is cut after max_doc_len
        "align": "bos",
        "bos_id": BOS,
        "max_doc_len": 200,
        "max_docs": 16,  # makes num_docs and doc_offsets
        "loss_mask": True,
        # whole shards in a random order; their documents keep theirs
        "shuffle": Shuffle(seed=1, unit="shard"),
        "backend": "pread",  # where another process may truncate shards while they are read
    }
    mixture = [(letters, 7), (digits, 3)]
    with TokenLoader(mixture, **options) as loader:
        batch = next(loader)
        print(
            f"batch {batch.step}: {batch.inputs.shape} tokens, documents per lane"
            f" {batch.num_docs.tolist()}"
        )
        first = batch.doc_offsets[0, : batch.num_docs[0] + 1]
        print(f"lane 0 has documents at {first[:-1].tolist()} of {first[-1]} tokens")
        weights = batch.loss_mask.astype(np.float32)  # a recipe's loss weights
        print(
            f"{int(batch.loss_mask.size - weights.sum())} targets follow a cut document and have no"
            " weight"
        )
        share = (batch.inputs[:, 1] == ord("d")).mean()
        print(f"{share:.0%} of the lanes come from digits")
        state = loader.state_dict()  # integers and strings, ready for JSON
        wanted = next(loader).tokens
        with TokenLoader(mixture, **options) as resumed:
            resumed.load_state_dict(state)
            assert np.array_equal(next(resumed).tokens, wanted)
        print(f"resumed at step {state['step']} with the same tokens")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
