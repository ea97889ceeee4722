"""What a run needs around the loop of train.py."""

import os

# This process, and the one that has started it: torchrun's agent, if it is a rank. train.py imports
# this before torch, which takes seconds, in which the agent may end.
PROCESS = os.getpid()
PARENT = os.getppid()
