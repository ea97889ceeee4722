"""Is your data parallelism right? `python -m judge mine.py`"""
