"""There is no wrap. The judge should refuse, and say what it needs."""



def warp(module):
    return module
