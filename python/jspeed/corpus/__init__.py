"""From documents to token shards: sources, downloads, tokenizers, what trains and what validates. Never imports jax."""
