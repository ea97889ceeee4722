"""The command. From another folder it is `python path/to/judge mine.py`."""

import pathlib
import sys

# As for a program: nothing of the folder where it is called comes before our files.
sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from judge.judge import main  # noqa: E402

sys.exit(main())
