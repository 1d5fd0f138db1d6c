"""Block-scaled FP8 GEMMs: dense, grouped by expert (contiguous, masked), and with ragged K by expert."""
