"""Oracle of the loader: its stream written from the rules in NumPy, slow, whole shards in memory,
no Rust."""

import numpy as np


def stream(shards, stages, lanes, align, bos, epochs=1):
    """Yield (epoch, tokens (lanes, T + 1), document ends of each lane, dropped tokens) for every
    batch."""
    todo, dropped = [stage for stage in stages for _ in range(stage.steps)], 0
    for epoch in range(epochs):
        for tokens in shards:
            starts, pos = np.flatnonzero(tokens == bos).tolist(), 0
            while todo and (
                made := (packed if align else windows)(tokens, starts, pos, lanes, todo[0])
            ):
                yield (
                    epoch,
                    made[0],
                    made[1],
                    dropped + made[2] - pos - made[0].size + (not align) * lanes,
                )
                pos, dropped, todo = made[2], 0, todo[1:]
            dropped += len(tokens) - pos


def windows(tokens, starts, pos, lanes, stage):
    """Recipe 7.3: lane r is [pos + r T, + T + 1)."""
    bases = range(pos, pos + lanes * (T := stage.lane_len), T)
    ends = [[start - base for start in starts if base < start < base + T] + [T] for base in bases]
    stop, rows = bases[-1] + T, [tokens[base : base + T + 1] for base in bases]
    return (np.stack(rows), ends, stop) if stop < len(tokens) else None


def packed(tokens, starts, pos, lanes, stage):
    """Recipe 1.3: documents from a cursor over their starts, cut at M and at T + 1 tokens."""
    T, M, ahead = stage.lane_len, stage.max_doc_len or len(tokens), [s for s in starts if s >= pos]
    rows, ends = [], []
    for _ in range(lanes):
        pieces, n = [], 0
        while n <= T:
            if not ahead:
                return None
            s = ahead.pop(0)
            pieces.append(tokens[s : min(ahead[0] if ahead else len(tokens), s + M, s + T + 1 - n)])
            n, stop = n + len(pieces[-1]), s + len(pieces[-1])
        rows.append(np.concatenate(pieces))
        ends.append(sorted({min(int(end), T) for end in np.cumsum([len(p) for p in pieces])}))
    return np.stack(rows), ends, stop
