"""It raises when it is imported. The judge should refuse, with its error."""

raise RuntimeError("this file wants another machine")
