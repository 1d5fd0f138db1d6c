"""The text that gives the demo model's tokenizer and word order."""

DEMO_TEXT = """\
The server reads a request and the scheduler gives it a place. The tokens of the request go to the model, \
and the model writes a page for every token. A page holds the keys of the past, and the past is what the \
model reads when it looks for the next token.

The indexer looks at every key in the cache and gives a number to each. Only the best keys are read, and the \
rest of the cache is left in the dark. This is why a long text is cheap: the model reads a few keys and not \
the whole of the past.

The router looks at the token and picks two experts. Each expert reads the token, thinks for a moment, and \
writes an answer. The answers are added, the shared expert adds its own, and the sum goes on to the next \
layer. An expert with no token does no work and waits for the next step.

The kernel loads the weights in small blocks. While one block is on its way, the tensor cores work on the \
block before it. The scales bring every number back to its size, and the sum is kept in registers until the \
last block is done. Then the tile is written, and the kernel takes the next tile.

The graph was made once and is used again and again. The graph has no questions: it reads the numbers from \
the same place, runs the same kernels, and writes the answer to the same place. When a request is done, its \
pages are free, and the next request takes them.

In the morning the cache is empty and the machine is quiet. Then a request comes, and a second, and the \
pages fill with words. The scheduler waits for no one. In the evening the last request is done, the pages \
are free again, and the machine dreams of numbers that are small and fast.
"""
