"""Boxing, the embedded default game: adapter, features, experts, demonstrations."""
