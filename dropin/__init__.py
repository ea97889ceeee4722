# nanoZeRO 1.1.0, SPDX-FileCopyrightText: 2026 the nanoZeRO authors
# SPDX-License-Identifier: MIT
"""DDP and the stages of ZeRO with all that torch's own take, and guards: for scripts that are not
plain. See README.md."""

from dropin.ddp import DDP
from dropin.zero import Zero1, Zero2, Zero3

__all__ = ["DDP", "Zero1", "Zero2", "Zero3"]
