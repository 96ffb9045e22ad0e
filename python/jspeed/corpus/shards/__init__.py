"""Folders of token shards: written whole, or shown."""
