"""The parts of a tokenizer, one module each: the file's fields, Unicode classes, normalizer, splitting, BPE, decoding.

`tlaloc_serve.artifact.tokenizer` puts them together and is what others import.
"""
