"""The indexer of sparse attention: its cache, its logits, their top-k, and the selection made of these."""
