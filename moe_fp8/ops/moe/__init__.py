"""The routed experts: the choice of experts, the whole layer, rows for experts, the sum of their results."""
