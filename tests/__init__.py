"""What is checked beside the proof: `python -m pytest`."""
