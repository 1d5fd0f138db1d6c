"""`python -m server_example --model DIR`: plan, load, capture, freeze, serve."""

from __future__ import annotations

import sys

from server_example.extra import server_extra

with server_extra():
    from server_example.serve import main

if __name__ == "__main__":
    sys.exit(main())
