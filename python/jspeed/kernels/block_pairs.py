"""FLOPs of attention kernels that compute whole blocks: each pair of a block of queries and one of
keys that it sees counts, once for each matmul of the kernel."""

from jspeed.model.custom_kernels import Call, Price


def price(
    call: Call, matmuls: int, channels: int, length: int, window: int, packed: bool, by_keys: bool
) -> Price:
    """Return the price of a call of lanes of ``length`` tokens with ``channels`` numbers in all
    lanes and heads.

    A query sees ``window`` keys, itself among them; ``packed``: of its document alone, of as many
    tokens as a document may have. ``by_keys``: a block is of keys and visits queries.
    """
    own, visited = call.numbers["own"], call.numbers["visited"]
    document = min(length, call.longest or length) if packed else length
    pairs = count(by_keys, length, document, window, own, visited)
    flops = matmuls * 2 * channels * own * visited * pairs
    if call.kernel == "forward":
        return Price("attention_forward", flops, dtype="bf16")
    return Price("attention_backward", flops, dtype="bf16")


def count(by_keys: bool, length: int, document: int, window: int, own: int, visited: int) -> int:
    """Pairs of a block of ``own`` queries and one of ``visited`` keys that it sees; of keys and
    queries ``by_keys``."""
    pairs = 0
    for start in range(0, length, own):
        end = min(start + own, length)
        if by_keys:  # blocks of queries, up to the last one that sees the last key
            last = min((end - 1) // document * document + document, length, end - 1 + window) - 1
            pairs += last // visited + 1 - start // visited
        else:
            first = max(start // document * document, start - window + 1)
            pairs += -(-end // visited) - first // visited
    return pairs
