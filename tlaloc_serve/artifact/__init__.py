"""The artifact directory on disk: manifest, bodies, weights, tokenizer. Knows nothing about devices."""
