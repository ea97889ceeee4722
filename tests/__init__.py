"""What verify.py does not say, by subject: `python -m pytest`."""
