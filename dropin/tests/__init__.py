"""What is checked of dropin/, by `python -m pytest dropin`."""
