"""What single records of the speedrun added, and their recipes alone use: MUDD, heads in pairs,
hashes of bigrams and trigrams, a softmax over candidates; NorMuon, ANVIL, cautious decay, Adams
that are slow or tied."""
