"""What is checked beside the proof, by `python -m pytest`; and what starts ranks, for both."""
