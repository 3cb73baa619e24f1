"""Corpus, tokenizer, packing and batches."""
