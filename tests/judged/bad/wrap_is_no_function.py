"""wrap cannot be called. The judge should refuse."""

wrap = 3
