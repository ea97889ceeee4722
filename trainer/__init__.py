"""What a run needs around the loop of train.py."""
