"""It imports what is not installed. The judge should refuse, and name it."""

import no_such_package


def wrap(module):
    return no_such_package.wrap(module)
